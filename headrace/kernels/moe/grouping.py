"""Rows grouped by expert for products in tiles: where each entry's row lies, and the tiles of rows.

Each expert's rows begin at a multiple of UNIT, so that a tile has rows of one expert alone and may be written whole.
Between one expert's last row and the next one's first lies what is never read.

Shapes    expert, place [T, k]; token [num_rows]: whose row it is; tiles
          [num_tiles, 3]: expert, first row, and rows, 1 to 2 UNIT; used [1]: tiles that are
Contract  sizes follow from shapes alone, and no step waits for the host: num_rows and num_tiles are the most there can
          be. Rows of one expert are in no particular order. T k is at least 1
Source    tokens grouped by expert as in Gale et al. 2022, "MegaBlocks"
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

UNIT = 64
ENTRIES = 256  # of a program that counts


class Groups(NamedTuple):
    place: Tensor  # [T, k] int32
    token: Tensor  # [num_rows] int32, of rows that tiles have
    tiles: Tensor  # [num_tiles, 3] int32
    used: Tensor  # [1] int32
    num_rows: int


@triton.jit(do_not_specialize=["n"])
def _rank_kernel(expert_ptr, rank_ptr, count_ptr, n, BLOCK: tl.constexpr):
    """rank: how many entries of the same expert were counted before this one."""
    let_next_start()
    wait_for_previous()
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < n
    expert = tl.load(expert_ptr + entry, mask=is_entry, other=0)
    rank = tl.atomic_add(count_ptr + expert, 1, mask=is_entry, sem="relaxed")
    tl.store(rank_ptr + entry, rank, mask=is_entry)


@triton.jit
def _tiles_kernel(
    count_ptr, first_ptr, tiles_ptr, used_ptr,
    E: tl.constexpr, PADDED_E: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One program: each expert's first row, and the tiles in their experts' order."""
    let_next_start()
    wait_for_previous()
    e = tl.arange(0, PADDED_E)
    count = tl.load(count_ptr + e, mask=e < E, other=0)
    units = tl.cdiv(count, UNIT)
    first = (tl.cumsum(units, 0) - units) * UNIT
    tl.store(first_ptr + e, first, mask=e < E)
    tiles = tl.cdiv(units, 2)
    place = tl.cumsum(tiles, 0) - tiles
    tl.store(used_ptr, tl.sum(tiles, 0))
    for i in range(tl.max(tiles, 0)):
        at = tiles_ptr + (place + i) * 3
        tl.store(at, e, mask=i < tiles)
        tl.store(at + 1, first + i * (2 * UNIT), mask=i < tiles)
        tl.store(at + 2, tl.minimum(count - i * (2 * UNIT), 2 * UNIT), mask=i < tiles)


@triton.jit(do_not_specialize=["n"])
def _place_kernel(expert_ptr, rank_ptr, first_ptr, place_ptr, token_ptr, n, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start()
    wait_for_previous()
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < n
    expert = tl.load(expert_ptr + entry, mask=is_entry, other=0)
    place = tl.load(first_ptr + expert, mask=is_entry, other=0) + tl.load(rank_ptr + entry, mask=is_entry, other=0)
    tl.store(place_ptr + entry, place, mask=is_entry)
    tl.store(token_ptr + place, entry // CHOICES, mask=is_entry)


def group(expert: Tensor, E: int) -> Groups:
    n, device = expert.numel(), expert.device
    expert = expert.contiguous()
    count = torch.zeros(E, dtype=torch.int32, device=device)
    first, used = (torch.empty(size, dtype=torch.int32, device=device) for size in (E, 1))
    rank, place = (torch.empty(expert.shape, dtype=torch.int32, device=device) for _ in range(2))
    # The most there can be, however entries fall.
    num_units, num_tiles = n // UNIT + min(E, n), n // (2 * UNIT) + min(E, n)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=device)
    token = torch.empty(num_units * UNIT, dtype=torch.int32, device=device)
    blocks = (cdiv(n, ENTRIES),)
    _rank_kernel[blocks](expert, rank, count, n, BLOCK=ENTRIES, num_warps=4, **OVERLAPPED)
    _tiles_kernel[(1,)](
        count, first, tiles, used, E=E, PADDED_E=next_power_of_2(E), UNIT=UNIT, num_warps=4, **OVERLAPPED
    )
    _place_kernel[blocks](
        expert, rank, first, place, token, n, CHOICES=expert.shape[1], BLOCK=ENTRIES, num_warps=4, **OVERLAPPED
    )
    return Groups(place, token, tiles, used, num_units * UNIT)
