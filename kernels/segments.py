"""What the state kernels must know of a batch besides its numbers: sequences, chunks and slots.

These values are built once a step on the host and shared by all layers. Rows of the sequences of a prefill
are packed one after the other; the chunked kernels cut each sequence into chunks of CHUNK_SIZE rows, the
last one zero-padded.

Legend: N sequences, T packed rows, C chunks, Q = CHUNK_SIZE rows a chunk, W state writes, S slots of a pool
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_SIZE = 32  # fastest on CPU among 16, 32 and 64 for both recurrences


class StateWrite(NamedTuple):
    """Write the state after the first `num_rows` rows (at least 1) of a sequence to `slot`."""

    sequence: int
    num_rows: int
    slot: int


@dataclass(frozen=True)
class StateSource:
    """Where N sequences find their state: a slot, or -1 for a fresh state of zeros, which is not read.

    A slot's convolution window may hold more inputs than the convolution has taps to look back with: those of
    draft tokens, of which a later step counts the first few as accepted. `window_offsets_N` says where in the
    window a sequence's history begins.
    """

    slots_N: Tensor  # int64
    any_fresh: bool
    window_offsets_N: Tensor | None = None  # int64; None: all zero

    @classmethod
    def of(
        cls, slots: Sequence[int | None], device: torch.device, window_offsets: Sequence[int] | None = None
    ) -> "StateSource":
        return cls(
            slots_N=torch.tensor([-1 if slot is None else slot for slot in slots], dtype=torch.int64, device=device),
            any_fresh=None in slots,
            window_offsets_N=None
            if window_offsets is None
            else torch.tensor(window_offsets, dtype=torch.int64, device=device),
        )

    def read(self, pool: Tensor) -> Tensor:
        """A copy [N, ...] of the sequences' states from pool [S, ...]."""
        if not self.any_fresh:
            return pool.index_select(0, self.slots_N)
        states = pool.index_select(0, self.slots_N.clamp(min=0))
        # Not a multiplication by zero: the slot may hold NaN.
        return states.masked_fill_((self.slots_N < 0).view(-1, *[1] * (states.dim() - 1)), 0)

    def read_windows(self, window_pool: Tensor, length: int) -> Tensor:
        """A copy [N, C, length] of the sequences' histories from windows [S, C, length or more]."""
        if self.window_offsets_N is None:
            return self.read(window_pool[..., :length])
        place_NL = self.window_offsets_N[:, None] + torch.arange(length, device=window_pool.device)
        windows = self.read(window_pool)
        return windows.gather(2, place_NL[:, None].expand(-1, windows.shape[1], -1))


@dataclass(frozen=True)
class PrefillSegments:
    """Packed sequences of at least one row each, the states they start from and the states to write."""

    lengths: tuple[int, ...]
    source: StateSource
    writes: tuple[StateWrite, ...]
    write_slots_W: Tensor  # int64
    write_chunk_W: Tensor  # int64, the chunk in which the write's last row lies
    write_row_W: Tensor  # int64, that row's place in its chunk, 0..Q-1
    chunk_counts: tuple[int, ...]
    padded_rows_T: Tensor | None  # int64, place of each packed row among the C*Q; None when no row is padding

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        src_slots: Sequence[int | None],
        writes: Sequence[StateWrite],
        device: torch.device,
    ) -> "PrefillSegments":
        counts = tuple(-(-length // CHUNK_SIZE) for length in lengths)
        first_chunk = [sum(counts[:i]) for i in range(len(counts))]
        last_rows = [first_chunk[w.sequence] * CHUNK_SIZE + w.num_rows - 1 for w in writes]
        last_row_W = torch.tensor(last_rows, dtype=torch.int64, device=device)
        padded = any(length % CHUNK_SIZE for length in lengths)
        rows = [
            torch.arange(first * CHUNK_SIZE, first * CHUNK_SIZE + length)
            for first, length in zip(first_chunk, lengths, strict=True)
        ]
        return cls(
            lengths=tuple(lengths),
            source=StateSource.of(src_slots, device),
            writes=tuple(writes),
            write_slots_W=torch.tensor([w.slot for w in writes], dtype=torch.int64, device=device),
            write_chunk_W=last_row_W // CHUNK_SIZE,
            write_row_W=last_row_W % CHUNK_SIZE,
            chunk_counts=counts,
            padded_rows_T=torch.cat(rows).to(device) if padded else None,
        )

    @property
    def num_chunks(self) -> int:
        return sum(self.chunk_counts)

    def to_chunks(self, x_T: Tensor) -> Tensor:
        """[T, ...] -> [C, Q, ...], padding rows zero."""
        if self.padded_rows_T is None:
            return x_T.reshape(self.num_chunks, CHUNK_SIZE, *x_T.shape[1:])
        padded = x_T.new_zeros(self.num_chunks * CHUNK_SIZE, *x_T.shape[1:])
        padded.index_copy_(0, self.padded_rows_T, x_T)
        return padded.view(self.num_chunks, CHUNK_SIZE, *x_T.shape[1:])

    def from_chunks(self, x_CQ: Tensor) -> Tensor:
        """[C, Q, ...] -> [T, ...], padding rows dropped."""
        flat = x_CQ.reshape(-1, *x_CQ.shape[2:])
        return flat if self.padded_rows_T is None else flat.index_select(0, self.padded_rows_T)


def rows_up_to(row_W: Tensor) -> Tensor:
    """[W, Q] float mask: 1 for the chunk's rows up to and including row_W."""
    return (torch.arange(CHUNK_SIZE, device=row_W.device) <= row_W[:, None]).float()
