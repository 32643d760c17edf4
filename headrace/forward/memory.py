"""The tensors of both pools of one node, with gather and scatter for transfers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.cache.conversion import BlockConversion
from headrace.cache.layout import CacheLayout
from headrace.forward.upload import PinnedIds, upload_ids
from headrace.kernels.transfer.gather_scatter import gather_rows, scatter_rows


def use_device(device: str) -> None:
    """Makes `device` the calling thread's current one: kernels are launched there, wherever their tensors lie."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(torch.device(device).index or 0)


class CacheMemory:
    """Blocks and states of all layers; the pools keep track of who owns them.

    kv    [num_blocks, attention layers, 2, block_size, KV heads, head_dim] in the model's dtype
    conv  [num_slots, state layers, channels, taps - 1] in the model's dtype
    rec   [num_slots, state layers, heads, ...] in the state's dtype

    Memory starts uninitialised: a block or slot is written before it is read. One block beyond the pool's,
    `scratch_block`, receives the keys and values of rows that only pad a captured graph's batch; their states go to
    slot -1, which is written nowhere.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, num_slots: int, device: torch.device | str = "cpu"):
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.device = torch.device(device)
        dtype, state_dtype = getattr(torch, layout.dtype), getattr(torch, layout.state_dtype)
        kv_shape = (layout.num_attention_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.scratch_block = num_blocks
        with_scratch = torch.empty((num_blocks + 1, *kv_shape), dtype=dtype, device=device)
        self.kv = with_scratch[:num_blocks]
        self.conv = torch.empty((num_slots, *layout.conv_shape), dtype=dtype, device=device)
        self.rec = torch.empty((num_slots, *layout.rec_shape), dtype=state_dtype, device=device)
        # One entry a layer of its kind: (keys, values), and (conv windows, recurrent states).
        self.kv_pools = [(with_scratch[:, i, 0], with_scratch[:, i, 1]) for i in range(layout.num_attention_layers)]
        self.state_pools = [(self.conv[:, i], self.rec[:, i]) for i in range(layout.conv_shape[0])]
        self._block_bytes = _as_bytes(self.kv)
        self._conv_bytes = _as_bytes(self.conv)
        self._rec_bytes = _as_bytes(self.rec)

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
        rows = self._regrouped(ids, first_token, num_blocks, conversion)
        rows_a_block = self.layout.num_attention_layers * 2 * (conversion.own_size // conversion.row_tokens)
        gather_rows(self._block_bytes.view(-1, self.layout.block_bytes // rows_a_block), rows, out)

    def _regrouped(self, ids: Tensor, first_token: int, num_blocks: int, conversion: BlockConversion) -> Tensor:
        """Row numbers within blocks `ids`, in the order in which `num_blocks` of the peer's blocks hold the rows.

        A row has the keys or the values of `row_tokens` tokens of one layer. The peer's first block begins with token
        `first_token` of `ids`.
        """
        row_tokens, block_size = conversion.row_tokens, conversion.peer_size
        rows_a_plane = conversion.own_size // row_tokens
        num_planes = self.layout.num_attention_layers * 2
        at_BR = torch.arange(0, num_blocks * block_size, row_tokens, device=self.device).view(num_blocks, -1)
        at_BR = (at_BR + first_token) // row_tokens
        blocks_BR = ids[(at_BR // rows_a_plane).clamp(max=len(ids) - 1)]
        planes_P = torch.arange(num_planes, device=self.device)
        planes_BPR = blocks_BR[:, None, :] * num_planes + planes_P[None, :, None]
        return (planes_BPR * rows_a_plane + (at_BR % rows_a_plane)[:, None, :]).flatten()

    def scatter_blocks(self, block_ids: Sequence[int], src: Tensor, pinned_ids: PinnedIds | None = None) -> None:
        """Copies src, uint8 [len(block_ids) * block_bytes], to blocks, in order."""
        scatter_rows(self._block_bytes, self._blocks(block_ids, pinned_ids), src)

    def gather_state(self, slot: int, out: Tensor, state_dtype: str | None = None) -> None:
        """Copies one state, conv windows first, to out: uint8 [state_bytes]; its recurrent part as `state_dtype`."""
        conv, rec = self._state(slot)
        conv_out, rec_out = out[: conv.nbytes], out[conv.nbytes :]
        _copy(conv_out, conv)
        if state_dtype in (None, self.layout.state_dtype):
            _copy(rec_out, rec)
        else:
            rec_out.copy_(_cast(self.rec[slot], getattr(torch, state_dtype)).view(-1).view(torch.uint8))

    def scatter_state(self, slot: int, src: Tensor, state_dtype: str | None = None) -> None:
        """Copies src, uint8 [state_bytes] with a recurrent part of `state_dtype`, to one slot."""
        conv, rec = self._state(slot)
        conv_src, rec_src = src[: conv.nbytes], src[conv.nbytes :]
        _copy(conv, conv_src)
        if state_dtype in (None, self.layout.state_dtype):
            _copy(rec, rec_src)
        else:
            # Through a tensor of its own: behind the conv windows the bytes need not be aligned to their dtype.
            arrived = torch.empty(self.rec.shape[1:], dtype=getattr(torch, state_dtype), device=self.device)
            arrived.view(-1).view(torch.uint8).copy_(rec_src)
            self.rec[slot].copy_(_cast(arrived, self.rec.dtype))

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

    def _state(self, slot: int) -> tuple[Tensor, Tensor]:
        """Conv windows and recurrent part as bytes: two pieces, which the driver copies as fast as a kernel would."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} is not in 0..{self.num_slots - 1}")
        return self._conv_bytes[slot], self._rec_bytes[slot]


def _copy(target: Tensor, source: Tensor) -> None:
    if target.nbytes != source.nbytes:
        raise ValueError(f"staging is not of a state's size: {source.nbytes} uint8 for {target.nbytes}")
    target.copy_(source, non_blocking=True)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values rounded to the nearest; those beyond float16's range become its largest number, not an infinity."""
    if dtype is torch.float16:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def _as_bytes(pool: Tensor) -> Tensor:
    """The pool as [rows, bytes a row], the same memory."""
    return pool.view(pool.shape[0], -1).view(torch.uint8)
