"""Products of grouped rows with their experts' matrices, warp-specialised for Hopper (Gluon).

    y[r] = form(x[r] W_e^T)        form: "swiglu" (gate rows first), "relu_squared", or "none"

As headrace/kernels/dense/swiglu_linear_hopper.py: one warp, the producer, issues bulk copies of the next pieces of x
and W, two consumers of 64 rows each multiply, programs are persistent. Here a tile's rows are one expert's
(headrace/kernels/moe/grouping.py). If all of them fit one consumer, the other only keeps pace.

Shapes    x [R, I], weight [E, O, I], tiles and used as `Groups` has them; returns [R, O], SwiGLU's [R, O / 2]
Contract  I is a multiple of 64, the width of y one of 8; all are contiguous and begin at multiples of 16 bytes. Rows
          that no tile has are not written. The reference is `grouped_linear_torch`
Numerics  sums and form in float32, rounded once
Source    CUTLASS, sm90 warp-specialised persistent products, grouped
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.dense.relu_squared import relu_squared_torch
from headrace.kernels.dense.swiglu import swiglu_torch
from headrace.kernels.lib.dispatch import num_multiprocessors
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.hopper import (
    LAYOUT,
    SPAN,
    BarrierRing,
    aggregate,
    launch_registers,
    make_barrier_ring,
    registers,
    reinterpret,
    tma_load,
    tma_store,
    wait_for_warps,
)
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.moe.grouping import UNIT, Groups

Form: TypeAlias = Literal["swiglu", "relu_squared", "none"]
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(UNIT)  # of a consumer
COLUMNS = gl.constexpr(128)  # of one half of the sums: gate or up, or left or right


def grouped_linear_torch(x: Tensor, weight: Tensor, groups: Groups, form: Form) -> Tensor:
    O = weight.shape[1]  # noqa: E741
    y = x.new_full((len(x), O // 2 if form == "swiglu" else O), float("nan"))
    for e, first, units in groups.tiles[: int(groups.used)].tolist():
        rows = slice(first, first + units * UNIT)
        product = x[rows] @ weight[e].T
        forms = {"swiglu": swiglu_torch, "relu_squared": relu_squared_torch, "none": lambda each: each}
        y[rows] = forms[form](product)
    return y


@aggregate
class Tiles:
    """The tiles of y: this program's, one after the other. A tile's columns lie side by side in time."""

    tiles_ptr: gl.tensor
    number: gl.tensor
    num_column_tiles: gl.tensor
    num_pieces: gl.tensor  # of each tile

    @gluon.constexpr_function
    def __init__(self, tiles_ptr, number, num_column_tiles, num_pieces):
        self.tiles_ptr = tiles_ptr
        self.number = number
        self.num_column_tiles = num_column_tiles
        self.num_pieces = num_pieces

    @gluon.jit
    def locate(self, tile):
        """A tile's expert, first row and units; of none past the last."""
        at = self.tiles_ptr + tile // self.num_column_tiles * 3
        is_tile = tile < self.number
        expert = gl.load(at, mask=is_tile, other=0)
        first_row = gl.load(at + 1, mask=is_tile, other=0)
        return expert, first_row, gl.load(at + 2, mask=is_tile, other=0)


@aggregate
class OperandRing:
    """A ring of STAGES pieces of x and W in shared memory."""

    x: gl.shared_memory_descriptor  # [STAGES * CONSUMERS, ROWS, SPAN]
    halves: gl.shared_memory_descriptor  # [STAGES * 2, COLUMNS, SPAN]
    weights: gl.shared_memory_descriptor  # the same memory as [STAGES, 2 * COLUMNS, SPAN]
    barriers: BarrierRing

    @gluon.constexpr_function
    def __init__(self, x, halves, weights, barriers):
        self.x = x
        self.halves = halves
        self.weights = weights
        self.barriers = barriers


@gluon.jit
def _make_ring(dtype: gl.constexpr, STAGES: gl.constexpr):
    x = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, SPAN], LAYOUT)
    halves = gl.allocate_shared_memory(dtype, [STAGES * 2, COLUMNS, SPAN], LAYOUT)
    weights = reinterpret(halves, [STAGES, 2 * COLUMNS, SPAN])
    return OperandRing(x, halves, weights, make_barrier_ring(STAGES, CONSUMERS))


@gluon.jit
def _produce(tiles, ring, x_desc, weight_desc, rows_an_expert, second_half, tile_columns):
    """second_half: rows of W from the first half of a tile's sums to the second."""
    W_BYTES: gl.constexpr = 2 * COLUMNS * SPAN * 2
    X_BYTES: gl.constexpr = ROWS * SPAN * 2
    done = 0  # pieces, those of earlier tiles included
    expert, first_row, units = tiles.locate(gl.program_id(0))
    for tile in range(gl.program_id(0), tiles.number, gl.num_programs(0)):
        next_expert, next_row, next_units = tiles.locate(tile + gl.num_programs(0))  # asked for a tile ahead
        first_weight = expert * rows_an_expert + tile % tiles.num_column_tiles * tile_columns
        for piece in range(tiles.num_pieces):
            slot, full = ring.barriers.slot(done), ring.barriers.full_barrier(done)
            ring.barriers.wait_free(done)
            mbarrier.expect(full, W_BYTES + X_BYTES, units == 1)
            mbarrier.expect(full, W_BYTES + CONSUMERS * X_BYTES, units == 2)
            for half in gl.static_range(2):
                at = [first_weight + half * second_half, piece * SPAN]
                tma_load(weight_desc, at, full, ring.halves.index(slot * 2 + half))
            for consumer in gl.static_range(CONSUMERS):
                at = [first_row + consumer * ROWS, piece * SPAN]
                tma_load(x_desc, at, full, ring.x.index(slot * CONSUMERS + consumer), pred=consumer < units)
            done += 1
        expert, first_row, units = next_expert, next_row, next_units


@gluon.jit
def _consume(tiles, ring, y_desc, y_tiles, FORM: gl.constexpr, ME: gl.constexpr):
    """Consumer ME: ROWS rows of every tile, from row ME * ROWS on."""
    TILE_COLUMNS: gl.constexpr = COLUMNS if FORM == "swiglu" else 2 * COLUMNS
    done = 0
    _, first_row, units = tiles.locate(gl.program_id(0))
    for tile in range(gl.program_id(0), tiles.number, gl.num_programs(0)):
        _, next_row, next_units = tiles.locate(tile + gl.num_programs(0))
        if units > ME:
            acc = _multiply(ring, tiles.num_pieces, done, ME)
            column = tile % tiles.num_column_tiles * TILE_COLUMNS
            _store(acc, y_desc, y_tiles, first_row + ME * ROWS, column, FORM, ME)
        else:
            for piece in range(tiles.num_pieces):
                ring.barriers.wait_full(done + piece)
                ring.barriers.release(done + piece)
        done += tiles.num_pieces
        first_row, units = next_row, next_units
    tma.store_wait(0)


@gluon.jit
def _multiply(ring, num_pieces, done, ME: gl.constexpr):
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    acc = gl.zeros([ROWS, 2 * COLUMNS], gl.float32, sums)
    for piece in range(num_pieces):
        n = done + piece
        slot = ring.barriers.slot(n)
        ring.barriers.wait_full(n)
        x, weights = ring.x.index(slot * CONSUMERS + ME), ring.weights.index(slot)
        acc = warpgroup_mma(x, weights.permute((1, 0)), acc, use_acc=piece > 0, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])  # the piece before has been read
        ring.barriers.release(n + ring.barriers.STAGES - 1, pred=piece > 0)
    acc = warpgroup_mma_wait(0, [acc])
    ring.barriers.release(done + num_pieces - 1)
    return acc


@gluon.jit
def _store(acc, y_desc, y_tiles, row, column, FORM: gl.constexpr, ME: gl.constexpr):
    """Writes a consumer's rows of y, by bulk copies from shared memory; no columns past the last."""
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    left, right = acc.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)).split()
    tma.store_wait(0)  # the tile before has left shared memory
    wait_for_warps()
    if FORM == "swiglu":
        y = left / (1.0 + gl.exp2(left * -LOG2_E)) * right
        y_tiles.index(ME).store(gl.convert_layout(y, out, assert_trivial=True).to(y_desc.dtype))
    else:
        if FORM == "relu_squared":
            left, right = gl.maximum(left, 0.0), gl.maximum(right, 0.0)
            left, right = left * left, right * right
        y_tiles.index(2 * ME).store(gl.convert_layout(left, out, assert_trivial=True).to(y_desc.dtype))
        y_tiles.index(2 * ME + 1).store(gl.convert_layout(right, out, assert_trivial=True).to(y_desc.dtype))
    fence_async_shared()
    wait_for_warps()
    if FORM == "swiglu":
        tma_store(y_desc, [row, column], y_tiles.index(ME))
    else:
        tma_store(y_desc, [row, column], y_tiles.index(2 * ME))
        tma_store(y_desc, [row, column + COLUMNS], y_tiles.index(2 * ME + 1))


@gluon.jit(do_not_specialize=["rows_an_expert", "num_column_tiles", "num_pieces"])
def _grouped_linear_kernel(
    x_desc, weight_desc, y_desc, tiles_ptr, used_ptr, rows_an_expert, num_column_tiles, num_pieces,
    FORM: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    TILE_COLUMNS: gl.constexpr = COLUMNS if FORM == "swiglu" else 2 * COLUMNS
    Y_TILES: gl.constexpr = TILE_COLUMNS // COLUMNS * CONSUMERS
    second_half = rows_an_expert // 2 if FORM == "swiglu" else COLUMNS
    ring = _make_ring(x_desc.dtype, STAGES)
    tiles = Tiles(tiles_ptr, gl.load(used_ptr) * num_column_tiles, num_column_tiles, num_pieces)
    y_tiles = gl.allocate_shared_memory(y_desc.dtype, [Y_TILES, ROWS, COLUMNS], LAYOUT)
    fence_async_shared()  # makes the barriers visible to the copy engine
    gl.warp_specialize(
        [(_consume, (tiles, ring, y_desc, y_tiles, FORM, 0)), (_consume, (tiles, ring, y_desc, y_tiles, FORM, 1)),
         (_produce, (tiles, ring, x_desc, weight_desc, rows_an_expert, second_half, TILE_COLUMNS))],
        [4, 1], [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def num_stages(form: Form) -> int:
    """Slots of the ring that fit a multiprocessor beside the tiles of y."""
    return 4 if form == "swiglu" else 3


def grouped_linear_hopper(x: Tensor, weight: Tensor, groups: Groups, form: Form, y: Tensor | None = None) -> Tensor:
    """Writes into `y` if it is given."""
    E, O, I = weight.shape  # noqa: E741
    width = O // 2 if form == "swiglu" else O
    if x.shape[1] != I or I % SPAN.value or width % 8:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: see this file's Contract")
    if y is None:
        y = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    num_column_tiles = cdiv(width, COLUMNS.value if form == "swiglu" else 2 * COLUMNS.value)
    programs = min(len(groups.tiles) * num_column_tiles, num_multiprocessors(x.device))
    consumer_registers, producer_registers = registers(CONSUMERS.value)
    _grouped_linear_kernel[(programs,)](
        _described(x, ROWS.value, SPAN.value), _described(weight.view(E * O, I), COLUMNS.value, SPAN.value),
        _described(y, ROWS.value, COLUMNS.value), groups.tiles, groups.used, O, num_column_tiles, I // SPAN.value,
        FORM=form, STAGES=num_stages(form), REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        num_warps=4, maxnreg=launch_registers(CONSUMERS.value),
    )  # fmt: skip
    return y


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], LAYOUT.value)
