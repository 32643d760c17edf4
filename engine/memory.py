"""The tensors of both pools of one node, and the way in and out of them for transfers."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from cache.layout import CacheLayout
from engine.upload import upload_values
from kernels.gather_scatter import gather_rows, scatter_rows

Mark: TypeAlias = torch.cuda.Event
"""A point in what the device has been given to do; who waits for it sleeps."""


def use_device(device: str) -> None:
    """For the calling thread: kernels are launched on its current device, wherever their tensors lie."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)


class CacheMemory:
    """Blocks and states of all layers; who owns which block or slot is the pools' business, not this class's.

    kv    [num_blocks, attention layers, 2, block_size, KV heads, head_dim] in the model's dtype
    conv  [num_slots, state layers, channels, taps - 1] in the model's dtype
    rec   [num_slots, state layers, heads, ...] in the state's dtype

    Memory starts uninitialised: whoever takes a block or slot writes it before reading it. One block more than
    the pool knows of, `scratch_block`, takes what rows write that only fill up a captured graph's batch; their
    states go to slot -1, which is written nowhere.
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

    def gather_blocks(self, block_ids: Sequence[int], out: Tensor) -> None:
        """Copy blocks, in order, to out: uint8 [len(block_ids) * block_bytes]."""
        gather_rows(self._block_bytes, self._rows(block_ids, self.num_blocks, "block"), out)

    def scatter_blocks(self, block_ids: Sequence[int], src: Tensor) -> None:
        """Copy src, uint8 [len(block_ids) * block_bytes], to blocks, in order."""
        scatter_rows(self._block_bytes, self._rows(block_ids, self.num_blocks, "block"), src)

    def gather_state(self, slot: int, out: Tensor) -> None:
        """Copy one state, conv windows first, to out: uint8 [state_bytes]."""
        row = self._rows([slot], self.num_slots, "slot")
        gather_rows(self._conv_bytes, row, out[: self.layout.conv_bytes])
        gather_rows(self._rec_bytes, row, out[self.layout.conv_bytes :])

    def scatter_state(self, slot: int, src: Tensor) -> None:
        """Copy src, uint8 [state_bytes], to one slot."""
        row = self._rows([slot], self.num_slots, "slot")
        scatter_rows(self._conv_bytes, row, src[: self.layout.conv_bytes])
        scatter_rows(self._rec_bytes, row, src[self.layout.conv_bytes :])

    def mark(self) -> Mark | None:
        """Behind all that has been launched on this memory; None on a host, where it has happened."""
        if self.device.type != "cuda":
            return None
        mark = torch.cuda.Event(blocking=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def _rows(self, ids: Sequence[int], limit: int, what: str) -> Tensor:
        for i in ids:
            if not 0 <= i < limit:
                raise IndexError(f"{what} {i} is not in 0..{limit - 1}")
        return upload_values(ids, self.device)


def _as_bytes(pool: Tensor) -> Tensor:
    """The pool as [rows, bytes a row], the same memory."""
    return pool.view(pool.shape[0], -1).view(torch.uint8)
