"""Two products of the same few rows in one launch: one in FP8, and beside it a small one in 16 bits.

    y = x W^T, side = x S^T

Shapes    x [M, I], M <= MOST_ROWS, in FP8 and in 16 bits (`Fp8Rows.plain`); W [O, I] in FP8; S [P, I], no gaps;
          returns [M, O] and [M, P] in S's dtype
Contract  that of small_linear.py: no earlier kernel on the stream writes W or S
Source    recipes in FP8 leave small matrices in 16 bits (decays, gates). Alone, such a product takes 4 to 5 us however
          small it is: a program for each 16 rows of S adds up whole rows. Beside W its programs start first, and end
          under those of W
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.fp8 import Fp8Matrix
from headrace.kernels.dense.fp8_rows import Fp8Rows, plain_rows
from headrace.kernels.dense.small_linear import (
    DTYPES,
    MOST_ROWS,
    Tile,
    operands,
    scale_groups,
    sizes,
    small_product,
    tile_for,
)
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start
from headrace.kernels.lib.sizes import cdiv

MOST_SIDE_ROWS = 512  # of S: its programs end under those of W
SIDE_TILE = Tile(columns=16, depth=128, parts=1, num_warps=4, num_stages=2)  # warps and stages are the other product's


@triton.jit(do_not_specialize=["M", "stride_scale"])
def _linear_pair_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, plain_ptr, side_ptr, side_out_ptr,
    M, stride_x, stride_scale, stride_plain,
    OUT: tl.constexpr, IN: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, AHEAD: tl.constexpr, ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr,
    SIDE_OUT: tl.constexpr, SIDE_PART: tl.constexpr, SIDE_COLUMNS: tl.constexpr, SIDE_DEPTH: tl.constexpr,
    SIDE_AHEAD: tl.constexpr, SIDE_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The first SIDE_PROGRAMS programs take the small matrix, the others the one in FP8."""
    let_next_start()
    program = tl.program_id(0)
    if program < SIDE_PROGRAMS:
        small_product(
            program, plain_ptr, None, side_ptr, None, side_out_ptr, M, stride_plain, 0,
            SIDE_OUT, IN, "plain", 1, SIDE_PART, ROWS, SIDE_COLUMNS, SIDE_DEPTH, SIDE_AHEAD, 0, 0,
        )  # fmt: skip
    else:
        small_product(
            program - SIDE_PROGRAMS, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, M, stride_x, stride_scale,
            OUT, IN, "plain", 1, PART, ROWS, COLUMNS, DEPTH, AHEAD, ROW_GROUP, COLUMN_GROUP,
        )  # fmt: skip


def linear_pair_triton(x: Fp8Rows, weight: Fp8Matrix, side: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    M, (num_out, num_in), num_side = len(x), weight.shape, len(side)
    rows, x_scales, values, scales = operands(x, weight)
    plain = plain_rows(x)
    if M > MOST_ROWS or not rows.shape[1] == num_in == side.shape[1] == plain.shape[1] or plain.stride(1) != 1:
        raise ValueError(f"x [{M}, {rows.shape[1]}], {tuple(weight.shape)} and {tuple(side.shape)} disagree")
    if not (values.is_contiguous() and side.is_contiguous()) or not side.dtype == plain.dtype == weight.dtype:
        raise ValueError(f"{side.dtype} beside products in {weight.dtype} of rows in {plain.dtype}: no gaps, one dtype")
    if side.dtype not in DTYPES:
        raise ValueError(f"{side.dtype}: 16 bits beside FP8")
    y, side_y = (torch.empty((M, width), dtype=side.dtype, device=side.device) for width in (num_out, num_side))
    if M:
        assert x_scales is not None
        tile = tile or tile_for(M, num_out, num_in, False, weight.has_blocks)
        _linear_pair_kernel[(cdiv(num_side, SIDE_TILE.columns) + cdiv(num_out, tile.columns),)](
            rows, x_scales, values, scales, y, plain, side, side_y,
            M, rows.stride(0), x_scales.stride(1), plain.stride(0),
            OUT=num_out, IN=num_in, **pair_sizes(M, num_in, num_side, tile), **scale_groups(weight),
            num_warps=tile.num_warps, num_stages=tile.num_stages, **OVERLAPPED,
        )  # fmt: skip
    return y, side_y


def pair_sizes(M: int, num_in: int, num_side: int, tile: Tile) -> dict[str, int]:
    """The kernel's constants for a tile of W and `num_side` rows of S."""
    of_weight, of_side = sizes(M, num_in, tile, weight_bytes=1), sizes(M, num_in, SIDE_TILE)
    of_side = {f"SIDE_{name}": of_side[name] for name in ("PART", "COLUMNS", "DEPTH", "AHEAD")}
    del of_weight["PARTS"]
    return of_weight | of_side | {"SIDE_OUT": num_side, "SIDE_PROGRAMS": cdiv(num_side, SIDE_TILE.columns)}
