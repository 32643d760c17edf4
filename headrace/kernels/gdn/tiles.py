"""Tiles of the delta rules' Triton decode kernels: how a state [Dk, Dv] is cut, and read and written."""

import math
from typing import NamedTuple

from torch import Tensor


class GdnTile(NamedTuple):
    """A program's tile of a state, and its warps and registers."""

    columns: int  # of a state
    num_warps: int
    access_bytes: int  # at most, in one read or write of a thread
    registers: int | None = None  # the most of a thread, for one row a sequence: with drafts they would spill


def launch_shape(num_heads: int, element_bytes: int) -> GdnTile:
    """Tile for `num_heads` value heads in the whole batch: the fastest on an H200 at batches of 1, 16, 64 and 256 of 32
    heads, of kernels that wrote a state in each step (a benchmark of 58e2fd5). A small batch is cut finer to occupy all
    132 multiprocessors."""
    if num_heads < 256:
        return GdnTile(32, 2, 8) if element_bytes == 4 else GdnTile(16, 1, 8)
    return GdnTile(64, 4, 8, registers=128) if element_bytes == 4 else GdnTile(64, 4, 4)


def access_bytes(state_pool: Tensor, most: int) -> int:
    """Bytes of one access, which divide the address of every head's state. Narrow accesses give a thread more keys of
    fewer columns, and sums over keys that need fewer words from other threads."""
    element = state_pool.element_size()
    slot, head = (stride * element for stride in state_pool.stride()[:2])
    return math.gcd(most, state_pool.data_ptr(), slot, head)
