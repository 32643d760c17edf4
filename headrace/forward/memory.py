"""The tensors of both pools of one node, with gather and scatter for transfers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.cache.conversion import BlockConversion
from headrace.cache.layout import DTYPE_BYTES, CacheLayout, StateGroup
from headrace.cache.tails import tail_places
from headrace.forward.state_formats import FORMAT_DTYPES, read_part, write_part
from headrace.forward.upload import PinnedIds, upload_ids
from headrace.kernels.gdn.tail_update import GdnTail
from headrace.kernels.ssd.tail_update import SsdTail
from headrace.kernels.transfer.gather_scatter import gather_rows, scatter_rows


def use_device(device: str) -> None:
    """Makes `device` the calling thread's current one: kernels are launched there, wherever their tensors lie."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(torch.device(device).index or 0)


class StatePools(NamedTuple):
    """The conv windows and the recurrent parts of states; a part that a layer lacks has no elements."""

    conv: Tensor
    rec: Tensor


class LayerTail(NamedTuple):
    """A state layer's ring: a row for each running sequence, an entry for each token (headrace/kernels/lib/tails.py).

    conv  [rows, places, channels], inputs of the convolution
    rec   entries of the recurrent part; None: the layer has none
    """

    conv: Tensor
    rec: SsdTail | GdnTail | None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.conv, *(self.rec or ())


class CacheMemory:
    """Blocks and states of all cache groups; the pools keep track of who owns them.

    attention    of each attention group [num_blocks, layers, planes, block_size, heads, head_dim] in the model's dtype
    states       of each state group conv [num_slots, layers, channels, taps - 1] in the model's dtype and
                 rec [num_slots, layers, heads, ...] in the state's dtype
    kv_pools     of each attention layer its keys and its values [num_blocks + 1, block_size, heads, head_dim]; of a
                 latent layer its one plane as both
    state_pools  of each state layer its conv windows and its recurrent parts [num_slots, ...]
    tails        of each state layer that keeps tails; none before `ModelRunner` has made them

    Layers are numbered in the order of the groups. A block is contiguous, with its part of each group one after the
    other. Memory starts uninitialised: a block or slot is written before it is read. One block beyond the pool's,
    `scratch_block`, receives the keys and values of rows that only pad a captured graph's batch; their states go to
    slot -1, which is written nowhere.

    Packed checkpoints are states in the layout `packed_layout`, as they travel: slots `num_slots` and up, which no step
    reads or writes.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        num_slots: int,
        device: torch.device | str = "cpu",
        *,
        checkpoint_dtype: str | None = None,
        num_packed_slots: int = 0,
        num_tail_rows: int | None = None,
    ):
        """`num_tail_rows`: running sequences with tails at most; None: as many as there are slots."""
        self.layout = layout
        self.packed_layout = layout.on_wire(checkpoint_dtype)
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.num_packed_slots = num_packed_slots
        self.num_tail_rows = num_slots if num_tail_rows is None else num_tail_rows
        self.tail_places = tail_places(layout.block_size)
        self.tails: tuple[LayerTail, ...] = ()
        self.device = torch.device(device)
        dtype, state_dtype = getattr(torch, layout.dtype), getattr(torch, layout.state_dtype)
        self.scratch_block = num_blocks
        sizes = [layout.block_elements(group) for group in layout.attention_groups]
        blocks = torch.empty((num_blocks + 1, sum(sizes)), dtype=dtype, device=device)
        with_scratch = [
            part.unflatten(1, (group.num_layers, group.num_planes, layout.block_size, group.num_heads, group.head_dim))
            for group, part in zip(layout.attention_groups, blocks.split(sizes, 1), strict=True)
        ]
        self.attention = [pool[:num_blocks] for pool in with_scratch]
        self.states = [
            StatePools(
                torch.empty((num_slots, group.num_layers, *group.conv_shape), dtype=dtype, device=device),
                torch.empty((num_slots, group.num_layers, *group.rec_shape), dtype=state_dtype, device=device),
            )
            for group in layout.state_groups
        ]
        packed_bytes = self.packed_layout.state_bytes if num_packed_slots else 0
        self._packed = torch.empty((num_packed_slots, packed_bytes), dtype=torch.uint8, device=device)
        self.kv_pools = [(layer[:, 0], layer[:, -1]) for pool in with_scratch for layer in pool.unbind(1)]
        self.state_pools = [
            StatePools(*layer) for conv, rec in self.states for layer in zip(conv.unbind(1), rec.unbind(1), strict=True)
        ]
        self._block_bytes = blocks[:num_blocks].view(torch.uint8)
        self._state_parts = [
            _StatePart(pool, group, is_recurrent)
            for group, pools in zip(layout.state_groups, self.states, strict=True)
            for pool, is_recurrent in ((pools.conv, False), (pools.rec, True))
            if pool[:1].numel()
        ]

    @property
    def pools(self) -> list[Tensor]:
        """All of its memory but the scratch block and packed checkpoints: `attention`, then each of `states`."""
        return [*self.attention, *(pool for pools in self.states for pool in pools)]

    def gather_prompt(
        self,
        block_ids: Sequence[int],
        block_size: int,
        first_block: int,
        num_blocks: int,
        out: Tensor,
        pinned_ids: PinnedIds | None = None,
    ) -> None:
        """Copies a part of the prompt in `block_ids` to out, as blocks of `block_size` tokens.

        first_block, num_blocks   the part, in blocks of that size; the end of the last one, beyond the prompt's own
                                  blocks, is filled with tokens of the prompt, which are never read
        out                       uint8 [num_blocks * bytes of such a block]
        pinned_ids                for the blocks' ids, see `upload_ids`
        """
        conversion = BlockConversion(self.layout.block_size, block_size)
        within = conversion.own_blocks(first_block, num_blocks, len(block_ids))
        ids = self._blocks(block_ids[within.start : within.stop], pinned_ids)
        if conversion.is_identity:
            gather_rows(self._block_bytes, ids, out)
            return
        first_token = first_block * block_size - within.start * conversion.own_size
        row_bytes, rows = self._regrouped(ids, first_token, num_blocks, conversion)
        gather_rows(self._block_bytes.view(-1, row_bytes), rows, out)

    def _regrouped(
        self, ids: Tensor, first_token: int, num_blocks: int, conversion: BlockConversion
    ) -> tuple[int, Tensor]:
        """Bytes of a row, and row numbers within blocks `ids`, in the order in which `num_blocks` of the peer's blocks
        hold the rows.

        A run has one plane of `row_tokens` tokens of one layer, which is one row, or several where the groups' runs
        differ in length. The peer's first block begins with token `first_token` of `ids`.
        """
        row_tokens, block_size, groups = conversion.row_tokens, conversion.peer_size, self.layout.attention_groups
        width = DTYPE_BYTES[self.layout.dtype]
        run_bytes = [row_tokens * group.num_heads * group.head_dim * width for group in groups]
        row_bytes = gcd(*run_bytes)
        runs_a_plane = conversion.own_size // row_tokens
        at_BR = torch.arange(0, num_blocks * block_size, row_tokens, device=self.device).view(num_blocks, -1)
        at_BR = (at_BR + first_token) // row_tokens
        blocks_BR = ids[(at_BR // runs_a_plane).clamp(max=len(ids) - 1)] * (self.layout.block_bytes // row_bytes)
        first_row, parts = 0, []
        for group, length in zip(groups, run_bytes, strict=True):
            rows_a_run, num_planes = length // row_bytes, group.num_layers * group.num_planes
            planes_P = torch.arange(num_planes, device=self.device) * runs_a_plane
            runs_BPR = planes_P[None, :, None] + (at_BR % runs_a_plane)[:, None, :]
            within_U = first_row + torch.arange(rows_a_run, device=self.device)
            parts.append((blocks_BR[:, None, :, None] + runs_BPR[..., None] * rows_a_run + within_U).flatten(1))
            first_row += num_planes * runs_a_plane * rows_a_run
        return row_bytes, torch.cat(parts, 1).flatten()

    def scatter_blocks(self, block_ids: Sequence[int], src: Tensor, pinned_ids: PinnedIds | None = None) -> None:
        """Copies src, uint8 [len(block_ids) * block_bytes], to blocks, in order."""
        scatter_rows(self._block_bytes, self._blocks(block_ids, pinned_ids), src)

    def gather_state(self, slot: int, out: Tensor, state_dtype: str | None = None) -> None:
        """Copies one state or packed checkpoint, group by group, to out: uint8 [state_bytes]; its recurrent parts as
        `state_dtype`, one of STATE_FORMATS."""
        self._require_slot(slot, self.num_slots + self.num_packed_slots)
        wire = self.layout.on_wire(state_dtype)
        if slot < self.num_slots:
            for part, piece, dtype in self._state(out, wire):
                write_part(part.pool[slot], piece, dtype)
        else:
            self._gather_packed(self._packed[slot - self.num_slots], out, wire)

    def _gather_packed(self, packed: Tensor, out: Tensor, wire: CacheLayout) -> None:
        kept = self._state(packed, self.packed_layout)
        for (part, piece, dtype), (_, kept_piece, kept_dtype) in zip(self._state(out, wire), kept, strict=True):
            if dtype is kept_dtype:
                piece.copy_(kept_piece, non_blocking=True)
            else:
                values = torch.empty_like(part.pool[0])
                read_part(kept_piece, values, kept_dtype)
                write_part(values, piece, dtype)

    def scatter_state(self, slot: int, src: Tensor, state_dtype: str | None = None) -> None:
        """Copies src, uint8 [state_bytes] with recurrent parts of `state_dtype`, to one slot."""
        self._require_slot(slot, self.num_slots)
        for part, piece, dtype in self._state(src, self.layout.on_wire(state_dtype)):
            read_part(piece, part.pool[slot], dtype)

    def pack(self, slot: int, packed_slot: int) -> None:
        """Copies a state to a packed checkpoint, behind all that was launched."""
        self.gather_state(slot, self._packed[packed_slot - self.num_slots], self.packed_layout.state_dtype)

    def unpack(self, packed_slot: int, slot: int) -> None:
        """Copies a packed checkpoint to a state, behind all that was launched."""
        self.scatter_state(slot, self._packed[packed_slot - self.num_slots], self.packed_layout.state_dtype)

    def ring_place(self, row: int, position: int) -> int:
        """A number, beyond those of slots, for the place of the token at `position` in a row of the rings."""
        return self.num_slots + row * self.tail_places + position % self.tail_places

    def record_event(self) -> torch.cuda.Event | None:
        """An event behind everything launched on this memory so far; None on a CPU, where it has already happened.

        Waiting for it blocks instead of spinning.
        """
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _blocks(self, block_ids: Sequence[int], pinned_ids: PinnedIds | None) -> Tensor:
        return upload_ids(block_ids, self.num_blocks, "block", self.device, pinned_ids)

    def _require_slot(self, slot: int, end: int) -> None:
        if not 0 <= slot < end:
            raise IndexError(f"slot {slot} is not in 0..{end - 1}")

    def _state(self, state: Tensor, wire: CacheLayout) -> Iterator[tuple["_StatePart", Tensor, torch.dtype]]:
        """The parts of one state in the layout `wire`, with the piece of its bytes `state` and the dtype of each.

        Two pieces a group, which the driver copies as fast as a kernel would.
        """
        sizes = [(wire.rec_bytes if part.is_recurrent else wire.conv_bytes)(part.group) for part in self._state_parts]
        if state.nbytes != sum(sizes):
            raise ValueError(f"staging is not of a state's size: {state.nbytes} uint8 for {sum(sizes)}")
        format_dtype = FORMAT_DTYPES[wire.state_dtype]
        dtypes = [format_dtype if part.is_recurrent else part.pool.dtype for part in self._state_parts]
        return zip(self._state_parts, state.split(sizes), dtypes, strict=True)


@dataclass(frozen=True)
class _StatePart:
    """The conv windows or the recurrent parts of one group, [num_slots, ...]."""

    pool: Tensor
    group: StateGroup
    is_recurrent: bool
