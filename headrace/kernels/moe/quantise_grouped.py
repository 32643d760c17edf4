"""Grouped rows quantised to FP8, a scale for each: those that tiles have, and none of what lies between experts.

Shapes    x [R, I] contiguous, tiles and used as `Groups` has them; returns values [R, I] and scales [R]
Contract  rows that no tile has are neither read nor written. The reference is `quantise_torch` of the others
Numerics  as headrace/kernels/dense/fp8.py
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.fp8 import FP8, store_fp8
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import next_power_of_2
from headrace.kernels.moe.grouping import UNIT, Groups

VALUES = 8192  # of a step: 64 a thread


@triton.jit
def _quantise_grouped_kernel(
    x_ptr, out_ptr, scale_ptr, tiles_ptr, used_ptr,
    IN: tl.constexpr, PADDED_IN: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a tile a program."""
    let_next_start()
    wait_for_previous()
    STEPS: tl.constexpr = TILE_ROWS // ROWS
    tile, within = tl.program_id(0) // STEPS, tl.program_id(0) % STEPS * ROWS + tl.arange(0, ROWS)
    if tile >= tl.load(used_ptr):
        return
    row = tl.load(tiles_ptr + tile * 3 + 1) + within
    is_row = within < tl.load(tiles_ptr + tile * 3 + 2)
    i = tl.arange(0, PADDED_IN)
    at = row.to(tl.int64)[:, None] * IN + i[None, :]
    is_value = is_row[:, None] & (i < IN)[None, :]
    x = tl.load(x_ptr + at, mask=is_value, other=0.0).to(tl.float32)
    store_fp8(x, out_ptr + at, scale_ptr + row, is_value, is_row)


def quantise_grouped(x: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    num_rows, num_in = x.shape
    out = torch.empty((num_rows, num_in), dtype=FP8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    padded = next_power_of_2(num_in)
    rows = min(max(1, VALUES // padded), 2 * UNIT)
    _quantise_grouped_kernel[(len(groups.tiles) * (2 * UNIT // rows),)](
        x, out, scales, groups.tiles, groups.used, IN=num_in, PADDED_IN=padded, ROWS=rows, TILE_ROWS=2 * UNIT,
        num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return out, scales
