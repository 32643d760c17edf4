"""Rows grouped by expert for products in tiles, and the weighted sum of what comes back to each token.

    groups = group(expert, E)                       where each entry's row lies, and the tiles of rows
    rows = spread(x, groups)                        rows[place[t, j]] = x[t]
    y = gather_sum(rows, weight, groups)            y[t] = sum_j weight[t, j] * rows[place[t, j]]

Each expert's rows begin at a multiple of UNIT, so that a tile has rows of one expert alone and is written whole. What
lies between one expert's last row and the next one's first is never read.

Shapes    expert, weight, place [T, k]; x, y [T, D]; rows [num_rows, D]; tiles [num_tiles, 3]: expert, first row, and
          how many units of the tile, 1 or 2, have rows at all; used [1]: tiles that are
Contract  sizes follow from shapes alone, and no step waits for the host: num_rows and num_tiles are the most there can
          be. Rows of one expert are in no particular order. D is a multiple of 16, T k at least 1
Numerics  sums in float32, rounded once
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
COLUMNS = 512  # of a program that copies or adds: 16 bytes a thread


class Groups(NamedTuple):
    place: Tensor  # [T, k] int32
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
    units = tl.cdiv(tl.load(count_ptr + e, mask=e < E, other=0), UNIT)
    first = (tl.cumsum(units, 0) - units) * UNIT
    tl.store(first_ptr + e, first, mask=e < E)
    tiles = tl.cdiv(units, 2)
    place = tl.cumsum(tiles, 0) - tiles
    tl.store(used_ptr, tl.sum(tiles, 0))
    for i in range(tl.max(tiles, 0)):
        at = tiles_ptr + (place + i) * 3
        tl.store(at, e, mask=i < tiles)
        tl.store(at + 1, first + i * (2 * UNIT), mask=i < tiles)
        tl.store(at + 2, tl.minimum(units - 2 * i, 2), mask=i < tiles)


@triton.jit(do_not_specialize=["n"])
def _place_kernel(expert_ptr, rank_ptr, first_ptr, place_ptr, n, BLOCK: tl.constexpr):
    let_next_start()
    wait_for_previous()
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < n
    expert = tl.load(expert_ptr + entry, mask=is_entry, other=0)
    place = tl.load(first_ptr + expert, mask=is_entry, other=0) + tl.load(rank_ptr + entry, mask=is_entry, other=0)
    tl.store(place_ptr + entry, place, mask=is_entry)


def group(expert: Tensor, E: int) -> Groups:
    n, device = expert.numel(), expert.device
    expert = expert.contiguous()
    count = torch.zeros(E, dtype=torch.int32, device=device)
    first, used = (torch.empty(size, dtype=torch.int32, device=device) for size in (E, 1))
    rank, place = (torch.empty(expert.shape, dtype=torch.int32, device=device) for _ in range(2))
    # The most there can be, however entries fall.
    num_units, num_tiles = n // UNIT + min(E, n), n // (2 * UNIT) + min(E, n)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=device)
    blocks = (cdiv(n, ENTRIES),)
    _rank_kernel[blocks](expert, rank, count, n, BLOCK=ENTRIES, num_warps=4, **OVERLAPPED)
    _tiles_kernel[(1,)](
        count, first, tiles, used, E=E, PADDED_E=next_power_of_2(E), UNIT=UNIT, num_warps=4, **OVERLAPPED
    )
    _place_kernel[blocks](expert, rank, first, place, n, BLOCK=ENTRIES, num_warps=4, **OVERLAPPED)
    return Groups(place, tiles, used, num_units * UNIT)


@triton.jit
def _spread_kernel(x_ptr, place_ptr, rows_ptr, stride_x, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start()
    wait_for_previous()
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // BLOCKS
    d = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token.to(tl.int64) * stride_x + d, mask=d < D, other=0.0)
    for j in tl.static_range(K):
        place = tl.load(place_ptr + token * K + j).to(tl.int64)
        tl.store(rows_ptr + place * D + d, x, mask=d < D)


def spread(x: Tensor, groups: Groups) -> Tensor:
    (T, k), D = groups.place.shape, x.shape[1]
    if D % 16 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} with strides {x.stride()}: needs dense rows of a multiple of 16 values")
    rows = torch.empty((groups.num_rows, D), dtype=x.dtype, device=x.device)
    _spread_kernel[(T * cdiv(D, COLUMNS),)](
        x, groups.place, rows, x.stride(0), D=D, K=k, BLOCK=COLUMNS, num_warps=2, **OVERLAPPED
    )
    return rows


@triton.jit
def _gather_sum_kernel(rows_ptr, weight_ptr, place_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start()
    wait_for_previous()
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // BLOCKS
    d = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        place = tl.load(place_ptr + token * K + j).to(tl.int64)
        weight = tl.load(weight_ptr + token * K + j).to(tl.float32)
        total += weight * tl.load(rows_ptr + place * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


def gather_sum(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    (T, k), D = groups.place.shape, rows.shape[1]
    out = torch.empty((T, D), dtype=rows.dtype, device=rows.device)
    _gather_sum_kernel[(T * cdiv(D, COLUMNS),)](
        rows, weight.contiguous(), groups.place, out, D=D, K=k, BLOCK=COLUMNS, num_warps=2, **OVERLAPPED
    )
    return out
