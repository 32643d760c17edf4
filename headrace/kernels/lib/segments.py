"""Sequences, chunks and slots of a batch, as the state kernels need them.

These values are built once a step on the host and shared by all layers. Rows of a prefill's sequences are packed one
after the other; the chunked torch kernels cut each sequence into chunks of CHUNK_SIZE rows, the last one zero-padded;
the Triton kernels cut as in headrace/kernels/lib/chunks.py.

Legend: N sequences, T packed rows, C chunks, Q = CHUNK_SIZE rows a chunk, W state writes, S slots of a pool
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.conv.table import ConvTable
from headrace.kernels.lib.chunks import ChunkTable, cut
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.upload import upload_values

CHUNK_SIZE = 32  # fastest on CPU among 16, 32 and 64 for both recurrences


class StateWrite(NamedTuple):
    """A state to write: the one after the first `num_rows` rows (at least 1) of a sequence, to `slot`."""

    sequence: int
    num_rows: int
    slot: int


@dataclass(frozen=True)
class StateSource:
    """Source slots of N sequences' states; -1 is a fresh state of zeros, for which nothing is read."""

    slots_N: Tensor  # int64
    any_fresh: bool

    @classmethod
    def of(cls, slots: Sequence[int | None], device: torch.device) -> "StateSource":
        return cls(
            slots_N=upload_values([-1 if slot is None else slot for slot in slots], device),
            any_fresh=None in slots,
        )

    def read(self, pool: Tensor) -> Tensor:
        """A copy [N, ...] of the sequences' states from pool [S, ...]."""
        if not self.any_fresh:
            return pool.index_select(0, self.slots_N)
        states = pool.index_select(0, self.slots_N.clamp(min=0))
        # Not a multiplication by zero: the slot may hold NaN.
        return states.masked_fill_((self.slots_N < 0).view(-1, *[1] * (states.dim() - 1)), 0)


@dataclass(frozen=True)
class PrefillSegments:
    """Packed sequences of at least one row each, the states they start from and the states to write."""

    lengths: tuple[int, ...]
    src_slots: tuple[int | None, ...]
    source: StateSource
    writes: tuple[StateWrite, ...]
    chunk_counts: tuple[int, ...]
    device: torch.device

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        src_slots: Sequence[int | None],
        writes: Sequence[StateWrite],
        device: torch.device,
    ) -> "PrefillSegments":
        return cls(
            lengths=tuple(lengths),
            src_slots=tuple(src_slots),
            source=StateSource.of(src_slots, device),
            writes=tuple(writes),
            chunk_counts=tuple(cdiv(length, CHUNK_SIZE) for length in lengths),
            device=torch.device(device),
        )

    # Values that only torch's or only Triton's implementations read are made when the step's first layer needs them.

    @cached_property
    def gpu_chunks(self) -> dict[int, ChunkTable]:
        """By chunk size; see `chunk_table`."""
        return {}

    def chunk_table(self, size: int) -> ChunkTable:
        """The chunks of at most `size` rows, for the Triton kernels."""
        if size not in self.gpu_chunks:
            first_rows = accumulate(self.lengths, initial=0)
            spans = zip(first_rows, self.lengths, self._writes_of_each, strict=False)
            chunks = [cut(*span, size) for span in spans]
            self.gpu_chunks[size] = ChunkTable.build(chunks, self.src_slots, self.device)
        return self.gpu_chunks[size]

    @cached_property
    def conv_tables(self) -> dict[tuple[int, int], ConvTable]:
        """By taps and rows a tile; see `conv_table`."""
        return {}

    def conv_table(self, taps: int, tile_rows: int) -> ConvTable:
        """The tiles, sequences and writes of a convolution, for its Triton kernel."""
        key = taps, tile_rows
        if key not in self.conv_tables:
            rows = self.lengths, self.src_slots, self._writes_of_each
            self.conv_tables[key] = ConvTable.build(*rows, taps, tile_rows, self.device)
        return self.conv_tables[key]

    @property
    def _writes_of_each(self) -> list[list[tuple[int, int]]]:
        """(rows of the sequence before it, slot) of each write, by sequence."""
        writes: list[list[tuple[int, int]]] = [[] for _ in self.lengths]
        for write in self.writes:
            writes[write.sequence].append((write.num_rows, write.slot))
        return writes

    @cached_property
    def write_slots_W(self) -> Tensor:
        return torch.tensor([w.slot for w in self.writes], dtype=torch.int64, device=self.device)

    @cached_property
    def write_chunk_W(self) -> Tensor:
        """int64, the chunk of the write's last row."""
        return self._last_row_W // CHUNK_SIZE

    @cached_property
    def write_row_W(self) -> Tensor:
        """int64, that row's index in its chunk, 0..Q-1."""
        return self._last_row_W % CHUNK_SIZE

    @cached_property
    def _last_row_W(self) -> Tensor:
        last_rows = [self._first_chunks[w.sequence] * CHUNK_SIZE + w.num_rows - 1 for w in self.writes]
        return torch.tensor(last_rows, dtype=torch.int64, device=self.device)

    @cached_property
    def _first_chunks(self) -> list[int]:
        return list(accumulate(self.chunk_counts, initial=0))

    @cached_property
    def padded_rows_T(self) -> Tensor | None:
        """int64, index of each packed row among the C*Q; None when no row is padding."""
        if not any(length % CHUNK_SIZE for length in self.lengths):
            return None
        rows = [
            torch.arange(first * CHUNK_SIZE, first * CHUNK_SIZE + length)
            for first, length in zip(self._first_chunks, self.lengths, strict=False)
        ]
        return torch.cat(rows).to(self.device)

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


def first_inputs(window_pool: Tensor, length: int) -> Tensor:
    """[S, C, length] of windows [S, C, length or more]; the pool itself if it is that long, as a view costs time."""
    return window_pool if window_pool.shape[2] == length else window_pool.narrow(2, 0, length)


def steps_of_each(dst_slots: Tensor, num_rows: int) -> int:
    """Rows T of each sequence of a decode batch: dst_slots [B, T], or [B] for T = 1, names a slot for every row."""
    if dst_slots.numel() != num_rows or dst_slots.dim() not in (1, 2):
        raise ValueError(f"{num_rows} rows and destination slots {tuple(dst_slots.shape)} disagree")
    return 1 if dst_slots.dim() == 1 else dst_slots.shape[1]
