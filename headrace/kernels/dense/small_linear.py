"""Dense products of few rows, those of decode steps: the weight is read once, at the memory's speed.

In FP8, and wherever one_round_hopper.py does not take them.

    plain    y = x W^T
    gated    y = silu(x G^T) * (x U^T), where W is G above U
    parts    y[s] = x[:, part s] W[:, part s]^T in float32: their sum is the product

Shapes    x [M, I], any stride over rows, M <= MOST_ROWS; weight [O, I], no gaps; y [M, O], gated [M, O / 2],
          parts [S, M, O] with S of `tile_for`
Contract  16-bit floats, or x and weight in FP8 (`Fp8Rows`, `Fp8Matrix`), scales of both for rows or for blocks; no
          earlier kernel on the stream writes the weight: it is fetched before those end
Numerics  sums in float32, rounded once. In FP8 the matrix units keep fewer bits of a sum between steps, as in
          fp8_linear.py
Source    W is the left operand, so that M pads to 16 columns and not to 64 rows. A product of 5 to 20 us spends a
          fifth on its start and its end: both overlap with the neighbours on the stream (pdl.py), while the first
          bytes of the weight are fetched into the second-level cache
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.fp8 import BLOCK, Fp8Matrix, Matrix
from headrace.kernels.dense.fp8_rows import Fp8Rows, Rows
from headrace.kernels.lib.dot import dot, dot_block
from headrace.kernels.lib.pdl import OVERLAPPED, fetch, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import MULTIPROCESSORS, cdiv

MOST_ROWS = 64
DTYPES = torch.float16, torch.bfloat16
SHARED_BYTES = 216 * 1024  # of a multiprocessor, for all programs on it


class Tile(NamedTuple):
    """A program's tile: `columns` of y (gated: half as many) from 1 / `parts` of each row of W."""

    columns: int
    depth: int  # values of a row of W in a step
    parts: int
    num_warps: int
    num_stages: int
    ahead: int = 256  # values of a row of W that are fetched before the kernels before this one have ended


def tile_for(M: int, num_out: int, num_in: int, can_split: bool, fp8_blocks: bool | None = None) -> Tile:
    """The tile for a product [M, num_in] x [num_out, num_in]^T, from times of one H200
    (`python3 -m benchmarks kernels-products`). `fp8_blocks`: of a weight in FP8, whether it has scales for blocks of
    columns; None: its weight has 16 bits.

    There are programs for every multiprocessor, all resident at once except for the widest products (heads). Shapes
    that give each multiprocessor equally many (Granite's) were the fastest with wide tiles, others (Qwen's, 160 to 288
    programs) with narrow ones, three to a multiprocessor. Split products of many rows were the fastest with at most one
    program a multiprocessor: fewer parts, many stages. Beside FP8 in blocks they are split further: a step of a program
    ends its product before the next one begins. What is fastest alone is not always so in a model: `_deep_fp8_tile`.
    """
    rows, is_few, is_fp8 = dot_block(M), M <= 16, fp8_blocks is not None
    if is_few and can_split and fp8_blocks is False:
        return _deep_fp8_tile(num_out, num_in)
    if is_few:
        columns, depth, narrowest = 64, 128, 32
    else:  # x is bytes, too: wide tiles read it less often
        columns, depth, narrowest = 128 if num_out >= 120 * 128 else 64, 64, 64
    parts = 1
    if can_split:
        # Parts are bytes, too, in float32: few beside W at 16 rows, but at 64 rows a quarter of it for each 4 parts.
        most = (2 if is_few else 3 if fp8_blocks else 1) * MULTIPROCESSORS
        while cdiv(num_out, columns) * parts * 2 <= most and 4 * depth * parts * 2 <= num_in:
            parts *= 2
    else:
        while columns > 16 and cdiv(num_out, columns) < 120:
            columns, depth = columns // 2, min(depth * 2, 8192 // rows)
    programs = cdiv(num_out, columns) * parts
    is_even = columns == 16 or _is_even(programs)
    if programs > 3 * MULTIPROCESSORS:  # several waves: one ends under the next
        resident = 2 if is_few else 1
    elif is_even or programs <= MULTIPROCESSORS:
        resident = cdiv(programs, MULTIPROCESSORS)
    else:
        resident = 3
        if columns > narrowest and 2 * programs <= 3 * MULTIPROCESSORS:
            columns //= 2
    value_bytes, most_stages = 2, 8
    if is_fp8:  # as many bytes in flight; a step has one scale for each row
        value_bytes, depth = 1, min(2 * depth, BLOCK if fp8_blocks else 2 * BLOCK)
    num_stages = SHARED_BYTES // resident // (value_bytes * (columns + rows) * depth)
    # Few rows: memory left free admits the next kernel's programs (and is their first-level cache).
    if is_few and resident < 3 and value_bytes * depth > BLOCK:
        most_stages = 4
    return Tile(columns, depth, parts, 4, max(2, min(most_stages, num_stages)))


def _deep_fp8_tile(num_out: int, num_in: int) -> Tile:
    """Up to 16 rows times FP8 with a scale for each row, in parts of equally many steps: about one program for each
    multiprocessor, with as many loads in flight as let the next kernel's programs in beside it. Where no such parts
    make so many programs and at most twice as many, the last part has fewer steps.

    From whole steps of models at one row (docs/gpu-notes.md, 39). Eight parts of 64 columns took 0.8 of the time of a
    product alone, and made the step of Qwen 7 % longer."""
    columns, depth = 64, 2 * BLOCK
    tiles, steps = cdiv(num_out, columns), cdiv(num_in, depth)
    most_parts = max(1, steps // 2)
    even = [parts for parts in range(1, most_parts + 1) if steps % parts == 0]
    parts = max((parts for parts in even if tiles * parts <= MULTIPROCESSORS), default=1)
    if tiles * parts < 0.75 * MULTIPROCESSORS:
        uneven = cdiv(steps, cdiv(steps, min(MULTIPROCESSORS // tiles, most_parts)))
        more = (more for more in even if MULTIPROCESSORS < tiles * more <= 2 * MULTIPROCESSORS)
        parts = next(more, uneven)
    resident = cdiv(tiles * parts, MULTIPROCESSORS)
    num_stages = SHARED_BYTES // resident // ((columns + dot_block(1)) * depth)
    return Tile(columns, depth, parts, 4, max(2, min(num_stages, 6 if resident == 1 else 4)))


def _is_even(programs: int) -> bool:
    """True if multiprocessors get about equally many programs; one too many does no harm."""
    return programs >= 0.9 * MULTIPROCESSORS * cdiv(programs - 1, MULTIPROCESSORS)


@triton.jit
def small_product(
    program, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, M, stride_x, stride_scale,
    OUT: tl.constexpr, IN: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
    ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr,
):  # fmt: skip
    """One program's part: COLUMNS rows of W, PART values of each; gated: half of them gate rows, half their up rows.

    ROW_GROUP and COLUMN_GROUP: rows and columns of W that share a scale; 0: no scales, and one for all columns. A row
    of x has a scale for each COLUMN_GROUP of its own, stride_scale apart. Waits for the kernel before."""
    IS_GATED: tl.constexpr = FORM == "gated"
    WIDTH: tl.constexpr = OUT // 2 if IS_GATED else OUT
    COLUMNS_OUT: tl.constexpr = COLUMNS // 2 if IS_GATED else COLUMNS
    part = program % PARTS
    first_column = program // PARTS * COLUMNS_OUT
    place = tl.arange(0, COLUMNS)
    weight_row = first_column + place % COLUMNS_OUT
    if WIDTH % COLUMNS_OUT:  # columns past the last are computed, but not stored
        weight_row = tl.minimum(weight_row, WIDTH - 1)
    if IS_GATED:
        weight_row += place // COLUMNS_OUT * WIDTH
    weights = weight_ptr + weight_row.to(tl.int64)[:, None] * IN + part * PART
    if AHEAD > 0:
        PIECES: tl.constexpr = max(1, 128 // COLUMNS)  # one instruction a thread
        WEIGHT_BYTES: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        fetch(weights + tl.arange(0, PIECES)[None, :] * (AHEAD // PIECES), AHEAD // PIECES * WEIGHT_BYTES)
    COLUMN_GROUPS: tl.constexpr = (IN + COLUMN_GROUP - 1) // COLUMN_GROUP if COLUMN_GROUP else 1
    if ROW_GROUP:
        scales = scale_ptr + weight_row // ROW_GROUP * COLUMN_GROUPS
        if not COLUMN_GROUP:
            scale = tl.load(scales)[:, None]
    wait_for_previous()

    row = tl.arange(0, ROWS)
    is_row = (row < M)[:, None]
    x_rows = x_ptr + row.to(tl.int64)[:, None] * stride_x + part * PART
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, PART, DEPTH):
        i = start + tl.arange(0, DEPTH)[None, :]
        if PARTS * PART > IN:
            is_inside = part * PART + i < IN
            weight = tl.load(weights + i, mask=is_inside, other=0.0)
            x = tl.load(x_rows + i, mask=is_row & is_inside, other=0.0)
        else:
            weight = tl.load(weights + i)
            x = tl.load(x_rows + i, mask=is_row, other=0.0)
        if COLUMN_GROUP:  # DEPTH divides it
            group = tl.minimum((part * PART + start) // COLUMN_GROUP, COLUMN_GROUPS - 1)
            x_scale = tl.load(x_scale_ptr + group * stride_scale + row, mask=row < M, other=0.0)[None, :]
            sums += dot(weight, tl.trans(x)) * (x_scale * tl.load(scales + group)[:, None])
        else:
            sums = dot(weight, tl.trans(x), sums)
    if ROW_GROUP and not COLUMN_GROUP:
        sums *= tl.load(x_scale_ptr + row, mask=row < M, other=0.0)[None, :] * scale

    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, COLUMNS_OUT, ROWS)), (1, 2, 0)))
        y = gate * tl.sigmoid(gate) * up
    else:
        y = sums
    column = (first_column + tl.arange(0, COLUMNS_OUT))[:, None]
    out = out_ptr + (part * M + row).to(tl.int64)[None, :] * WIDTH + column
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=(row < M)[None, :] & (column < WIDTH))


# One compiled kernel for all batches of a tile: none compiles while serving.
@triton.jit(do_not_specialize=["M", "stride_scale"])
def _small_linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, M, stride_x, stride_scale,
    OUT: tl.constexpr, IN: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
    ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr,
):  # fmt: skip
    let_next_start()
    small_product(
        tl.program_id(0), x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, M, stride_x, stride_scale,
        OUT, IN, FORM, PARTS, PART, ROWS, COLUMNS, DEPTH, AHEAD, ROW_GROUP, COLUMN_GROUP,
    )  # fmt: skip


def small_linear_triton(
    x: Rows,
    weight: Matrix,
    form: str = "plain",
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    M, (num_out, num_in) = len(x), weight.shape
    rows, x_scales, values, scales = operands(x, weight)
    dtype, device = weight.dtype, rows.device
    if M > MOST_ROWS or rows.shape[1] != num_in or rows.stride(1) != 1:
        raise ValueError(f"x {tuple(rows.shape)} of strides {rows.stride()}, weight {tuple(weight.shape)} disagree")
    if not values.is_contiguous() or dtype not in DTYPES or (form == "gated" and num_out % 2):
        raise ValueError(f"weight {tuple(weight.shape)} {weight.dtype} {values.stride()}: 16 bits, no gaps, two halves")
    is_fp8 = isinstance(weight, Fp8Matrix)
    tile = tile or tile_for(M, num_out, num_in, form == "parts", weight.has_blocks if is_fp8 else None)
    width = num_out // 2 if form == "gated" else num_out
    shape = (tile.parts, M, num_out) if form == "parts" else (M, width)
    out_dtype = torch.float32 if form == "parts" else dtype
    out = torch.empty(shape, dtype=out_dtype, device=device) if out is None else checked_out(out, shape, out_dtype)
    if M:
        columns_out = tile.columns // 2 if form == "gated" else tile.columns
        _small_linear_kernel[(cdiv(width, columns_out) * tile.parts,)](
            rows, x_scales, values, scales, out, M, rows.stride(0), 0 if x_scales is None else x_scales.stride(1),
            OUT=num_out, IN=num_in, FORM=form, **sizes(M, num_in, tile, values.itemsize), **scale_groups(weight),
            num_warps=tile.num_warps, num_stages=tile.num_stages, **OVERLAPPED,
        )  # fmt: skip
    return out


def checked_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`out`, where a kernel may write a result of that shape. Raises ValueError otherwise."""
    if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} of strides {out.stride()}: {shape} {dtype}, no gaps")
    return out


def operands(x: Rows, weight: Matrix) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """x, its scales, the weight and its scales, as the kernel takes them."""
    if isinstance(x, Fp8Rows) and isinstance(weight, Fp8Matrix):
        if x.scales.shape[1] != weight.scales.shape[1]:
            raise ValueError(f"x has {x.scales.shape[1]} scales a row, the weight {weight.scales.shape[1]}")
        return x.values, x.scales, weight.values, weight.scales
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.dtype != weight.dtype:
        kinds = [each.dtype if isinstance(each, Tensor) else "FP8" for each in (x, weight)]
        raise ValueError(f"x in {kinds[0]} and a weight in {kinds[1]} disagree")
    return x, None, weight, None


NO_GROUPS = {"ROW_GROUP": 0, "COLUMN_GROUP": 0}


def scale_groups(weight: Matrix) -> dict[str, int]:
    """The kernel's constants for a matrix's scales."""
    if isinstance(weight, Tensor):
        return NO_GROUPS
    return {"ROW_GROUP": weight.row_group, "COLUMN_GROUP": BLOCK if weight.has_blocks else 0}


def sizes(M: int, num_in: int, tile: Tile, weight_bytes: int = 2) -> dict[str, int]:
    """The kernel's constants for a tile."""
    steps = cdiv(cdiv(num_in, tile.depth), tile.parts)
    part = steps * tile.depth
    # Bytes to fetch ahead exist, at multiples of 16.
    is_even = tile.parts * part == num_in and num_in * weight_bytes % 16 == 0
    return {
        "PARTS": tile.parts,
        "PART": part,
        "ROWS": dot_block(M),
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "AHEAD": min(tile.ahead, part) if is_even else 0,
    }
