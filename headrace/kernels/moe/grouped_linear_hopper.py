"""Products of grouped rows with their experts' matrices, warp-specialised for Hopper (Gluon).

    y[r] = form(x[r] W_e^T)        form: "swiglu" (gate rows first), "relu_squared", or "none"

As headrace/kernels/dense/swiglu_linear_hopper.py: a producer copies the next pieces of x and W
(grouped_producers_hopper.py), two consumers of 64 rows each multiply, programs are persistent. Here a tile's rows are
one expert's (grouping.py). If all of them fit one consumer, the other only keeps pace.

Shapes    x [R, I], or gathered: x [T, I], and row r is that of token[r]; weight [E, O, I]; token, tiles and used as
          `Groups` has them; returns [R, O], SwiGLU's [R, O / 2]. In FP8 each row of x and of weight has a scale
Contract  I is a multiple of 16, the width of y one of 8; all are contiguous and begin at multiples of 16 bytes.
          Gathered rows are of multiples of SPAN_BYTES, may have any stride that is a multiple of 16, and span less than
          2^31 values. Units of UNIT rows without any that a tile has are not written. Reference: `grouped_linear_torch`
Numerics  sums and form in float32, rounded once; sums of FP8 as those of fp8_linear.py
Source    CUTLASS, sm90 warp-specialised persistent products, grouped
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace.kernels.dense.relu_squared import relu_squared_torch
from headrace.kernels.dense.swiglu import swiglu_torch
from headrace.kernels.lib.dispatch import num_multiprocessors
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.hopper import described, launch_registers, registers, tma_store, wait_for_warps
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.moe.grouped_producers_hopper import (
    COLUMNS,
    CONSUMERS,
    GATHERING_WARPS,
    ROWS,
    SPAN_BYTES,
    Tiles,
    make_ring,
    produce,
    produce_gathered,
)
from headrace.kernels.moe.grouping import Groups

Form: TypeAlias = Literal["swiglu", "relu_squared", "none"]


class Operand(NamedTuple):
    """Rows of an operand, and in FP8 their scales, float32."""

    values: Tensor
    scales: Tensor | None = None


def grouped_linear_torch(x: Tensor, weight: Tensor, groups: Groups, form: Form, gathered: bool = False) -> Tensor:
    O = weight.shape[1]  # noqa: E741
    y = torch.full((groups.num_rows, O // 2 if form == "swiglu" else O), float("nan"), dtype=x.dtype, device=x.device)
    for e, first, count in groups.tiles[: int(groups.used)].tolist():
        rows = slice(first, first + count)
        product = x[groups.token[rows] if gathered else rows] @ weight[e].T
        forms = {"swiglu": swiglu_torch, "relu_squared": relu_squared_torch, "none": lambda each: each}
        y[rows] = forms[form](product)
    return y


@gluon.jit
def _consume(
    tiles, ring, y_desc, y_tiles, token_ptr, x_scale_ptr, weight_scale_ptr,
    FORM: gl.constexpr, GATHERED: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """Consumer ME: ROWS rows of every tile, from row ME * ROWS on."""
    TILE_COLUMNS: gl.constexpr = COLUMNS if FORM == "swiglu" else 2 * COLUMNS
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    done = 0
    expert, first_row, count = tiles.locate(gl.program_id(0))
    for tile in range(gl.program_id(0), tiles.number, gl.num_programs(0)):
        next_expert, next_row, next_count = tiles.locate(tile + gl.num_programs(0))
        if count > ME * ROWS:
            column = tiles.column(tile, TILE_COLUMNS)
            if x_scale_ptr is not None:  # before the products: they arrive under those
                flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
                row = ME * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, out))
                if GATHERED:
                    row_at = gl.load(token_ptr + first_row + row, mask=row < count, other=0)
                else:
                    row_at = first_row + row
                x_scale = gl.load(x_scale_ptr + row_at, mask=row < count, other=0.0)
                left_column = column + gl.arange(0, COLUMNS, layout=flat)
                scales = weight_scale_ptr + expert * tiles.rows_an_expert + left_column
                left_scale = gl.load(scales, mask=left_column < tiles.rows_an_expert, other=0.0)
                right_mask = left_column + tiles.second_half < tiles.rows_an_expert
                right_scale = gl.load(scales + tiles.second_half, mask=right_mask, other=0.0)
            if FORM == "swiglu":  # noqa: SIM114 (known when this compiles, which `or` is not)
                left, right = _both_halves(ring, tiles.num_pieces, done, out, GATHERED, ME)
            elif tiles.has_both_halves(tile, TILE_COLUMNS):
                left, right = _both_halves(ring, tiles.num_pieces, done, out, GATHERED, ME)
            else:
                left = _multiply(ring, tiles.num_pieces, done, GATHERED, 1, ME)
                left = gl.convert_layout(left, out, assert_trivial=True)
                right = gl.zeros([ROWS, COLUMNS], gl.float32, out)  # past the last column: not written
            if x_scale_ptr is not None:
                left_scale = gl.convert_layout(left_scale, gl.SliceLayout(0, out))
                right_scale = gl.convert_layout(right_scale, gl.SliceLayout(0, out))
                left = left * x_scale[:, None] * left_scale[None, :]
                right = right * x_scale[:, None] * right_scale[None, :]
            _store(left, right, y_desc, y_tiles, first_row + ME * ROWS, column, FORM, ME)
        else:
            for piece in range(tiles.num_pieces):
                ring.barriers.wait_full(done + piece)
                ring.barriers.release(done + piece)
        done += tiles.num_pieces
        expert, first_row, count = next_expert, next_row, next_count
    tma.store_wait(0)


@gluon.jit
def _both_halves(ring, num_pieces, done, out: gl.constexpr, GATHERED: gl.constexpr, ME: gl.constexpr):
    """Sums [ROWS, COLUMNS] of a tile's left and right half."""
    acc = _multiply(ring, num_pieces, done, GATHERED, 2, ME)
    left, right = acc.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, out, assert_trivial=True), gl.convert_layout(right, out, assert_trivial=True)


@gluon.jit
def _multiply(ring, num_pieces, done, GATHERED: gl.constexpr, HALVES: gl.constexpr, ME: gl.constexpr):
    """Sums [ROWS, HALVES * COLUMNS] of a tile's pieces."""
    DEPTH: gl.constexpr = 256 // ring.x.dtype.primitive_bitwidth
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALVES * COLUMNS, DEPTH])
    acc = gl.zeros([ROWS, HALVES * COLUMNS], gl.float32, sums)
    for piece in range(num_pieces):
        n = done + piece
        slot = ring.barriers.slot(n)
        ring.barriers.wait_full(n)
        if GATHERED:
            fence_async_shared()  # threads wrote x: makes it visible to the matrix units
        x = ring.x.index(slot * CONSUMERS + ME)
        weights = ring.weights.index(slot) if HALVES == 2 else ring.halves.index(slot * 2)
        acc = warpgroup_mma(x, weights.permute((1, 0)), acc, use_acc=piece > 0, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])  # the piece before has been read
        ring.barriers.release(n + ring.barriers.STAGES - 1, pred=piece > 0)
    acc = warpgroup_mma_wait(0, [acc])
    ring.barriers.release(done + num_pieces - 1)
    return acc


@gluon.jit
def _store(left, right, y_desc, y_tiles, row, column, FORM: gl.constexpr, ME: gl.constexpr):
    """Writes a consumer's rows of y, by bulk copies from shared memory; no columns past the last."""
    tma.store_wait(0)  # the tile before has left shared memory
    wait_for_warps()
    if FORM == "swiglu":
        y = left / (1.0 + gl.exp2(left * -LOG2_E)) * right
        y_tiles.index(ME).store(y.to(y_desc.dtype))
    else:
        if FORM == "relu_squared":
            left, right = gl.maximum(left, 0.0), gl.maximum(right, 0.0)
            left, right = left * left, right * right
        y_tiles.index(2 * ME).store(left.to(y_desc.dtype))
        y_tiles.index(2 * ME + 1).store(right.to(y_desc.dtype))
    fence_async_shared()
    wait_for_warps()
    if FORM == "swiglu":
        tma_store(y_desc, [row, column], y_tiles.index(ME))
    else:
        tma_store(y_desc, [row, column], y_tiles.index(2 * ME))
        tma_store(y_desc, [row, column + COLUMNS], y_tiles.index(2 * ME + 1))


@gluon.jit(do_not_specialize=["rows_an_expert", "num_column_tiles", "num_pieces"])
def _grouped_linear_kernel(
    x, x_scale_ptr, weight_desc, weight_scale_ptr, y_desc, tiles_ptr, used_ptr, token_ptr,
    stride_x, rows_an_expert, num_column_tiles, num_pieces,
    FORM: gl.constexpr, GATHERED: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """x: a pointer, gathered, or a descriptor."""
    TILE_COLUMNS: gl.constexpr = COLUMNS if FORM == "swiglu" else 2 * COLUMNS
    Y_TILES: gl.constexpr = TILE_COLUMNS // COLUMNS * CONSUMERS
    second_half = rows_an_expert // 2 if FORM == "swiglu" else COLUMNS
    ring = make_ring(weight_desc, STAGES, GATHERED)
    number = gl.load(used_ptr) * num_column_tiles
    tiles = Tiles(tiles_ptr, number, num_column_tiles, num_pieces, rows_an_expert, second_half)
    y_tiles = gl.allocate_shared_memory(y_desc.dtype, [Y_TILES, ROWS, COLUMNS], y_desc.layout)
    fence_async_shared()  # makes the barriers visible to the copy engine
    if GATHERED:
        gl.warp_specialize(
            [(_consume, (tiles, ring, y_desc, y_tiles, token_ptr, x_scale_ptr, weight_scale_ptr, FORM, True, 0)),
             (_consume, (tiles, ring, y_desc, y_tiles, token_ptr, x_scale_ptr, weight_scale_ptr, FORM, True, 1)),
             (produce_gathered, (tiles, ring, x, stride_x, token_ptr, weight_desc, TILE_COLUMNS))],
            [4, GATHERING_WARPS], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consume, (tiles, ring, y_desc, y_tiles, token_ptr, x_scale_ptr, weight_scale_ptr, FORM, False, 0)),
             (_consume, (tiles, ring, y_desc, y_tiles, token_ptr, x_scale_ptr, weight_scale_ptr, FORM, False, 1)),
             (produce, (tiles, ring, x, weight_desc, TILE_COLUMNS))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def num_stages(form: Form) -> int:
    """Slots of the ring that fit a multiprocessor beside the tiles of y."""
    return 4 if form == "swiglu" else 3


def grouped_linear_hopper(
    x: Operand, weight: Operand, groups: Groups, form: Form, dtype: torch.dtype, gathered: bool = False
) -> Tensor:
    E, O, I = weight.values.shape  # noqa: E741
    width = O // 2 if form == "swiglu" else O
    span = SPAN_BYTES.value // weight.values.element_size()
    if x.values.shape[1] != I or I % (span if gathered else 16) or width % 8 or x.values.stride(0) % 16:
        raise ValueError(f"x {tuple(x.values.shape)}, weight {tuple(weight.values.shape)}: see this file's Contract")
    y = torch.empty((groups.num_rows, width), dtype=dtype, device=x.values.device)
    num_column_tiles = cdiv(width, COLUMNS.value if form == "swiglu" else 2 * COLUMNS.value)
    programs = min(len(groups.tiles) * num_column_tiles, num_multiprocessors(y.device))
    consumer_registers, producer_registers = registers(CONSUMERS.value)
    _grouped_linear_kernel[(programs,)](
        x.values if gathered else described(x.values, ROWS.value, span), x.scales,
        described(weight.values.view(E * O, I), COLUMNS.value, span), weight.scales,
        described(y, ROWS.value, COLUMNS.value), groups.tiles, groups.used, groups.token,
        x.values.stride(0), O, num_column_tiles, cdiv(I, span), FORM=form, GATHERED=gathered, STAGES=num_stages(form),
        REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        num_warps=4, maxnreg=launch_registers(CONSUMERS.value),
    )  # fmt: skip
    return y
