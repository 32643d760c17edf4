"""SwiGLU's first product and its gate in one kernel, warp-specialised for Hopper (Gluon): silu(x Wg^T) * (x Wu^T).

The library writes gate and up, and another kernel reads them: 512 MiB of granite-h-micro's 8,192 rows. Here both sums
of a tile end in the registers of one warp group, which writes y alone. One warp, the producer, issues bulk copies (TMA)
of the next pieces of x and W; the consumers, two warp groups of 64 rows each, multiply. While one of them applies the
gate, the other has the matrix units: they may be as many pieces apart as the ring has slots. Programs are persistent.

Shapes    x [M, I], any row stride; weight [2 * O, I], the gate's rows above up's; returns [M, O]
Contract  I is a multiple of 64 and O of 128; x's rows and the weight begin at multiples of 16 bytes: the copy engine
          needs that. The reference is headrace.kernels.dense.swiglu of the library's product
Numerics  sums, SiLU and product in float32, rounded once (headrace.kernels.dense.swiglu gets gate and up rounded)
Source    CUTLASS, sm90 warp-specialised persistent products; Shazeer 2020, "GLU Variants Improve Transformer"
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

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

from headrace.kernels.lib.dispatch import num_multiprocessors, runs_hopper
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.hopper import (
    LAYOUT,
    SPAN,
    BarrierRing,
    aggregate,
    can_be_copied,
    described,
    launch_registers,
    make_barrier_ring,
    registers,
    reinterpret,
    tma_load,
    tma_store,
    wait_for_warps,
)
from headrace.kernels.lib.sizes import cdiv

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a consumer
COLUMNS = gl.constexpr(128)  # of y: 256 sums, the widest product there is
STAGES = gl.constexpr(4)  # slots of the ring, each for a piece of SPAN columns of x and W
GROUP = gl.constexpr(16)  # tiles of rows that read the same weights while those are in the cache
LEAST_FULL = 0.85  # tiles over programs times rounds; below that the library and swiglu.py took less time


@aggregate
class Tiles:
    """The tiles of y, in the order in which programs take them."""

    num_row_tiles: gl.tensor
    num_column_tiles: gl.tensor
    num_pieces: gl.tensor  # of each tile

    @gluon.constexpr_function
    def __init__(self, num_row_tiles, num_column_tiles, num_pieces):
        self.num_row_tiles = num_row_tiles
        self.num_column_tiles = num_column_tiles
        self.num_pieces = num_pieces

    @gluon.jit
    def number(self):
        return self.num_row_tiles * self.num_column_tiles

    @gluon.jit
    def locate(self, tile):
        """A tile's first row and column: down GROUP tiles of rows, then one tile of columns to the right."""
        a_group = GROUP * self.num_column_tiles
        first = tile // a_group * GROUP
        height = gl.minimum(self.num_row_tiles - first, GROUP)
        row_tile, column_tile = first + tile % a_group % height, tile % a_group // height
        return row_tile * (CONSUMERS * ROWS), column_tile * COLUMNS


@aggregate
class OperandRing:
    """A ring of STAGES pieces of x and W in shared memory."""

    x: gl.shared_memory_descriptor  # [STAGES * CONSUMERS, ROWS, SPAN]
    halves: gl.shared_memory_descriptor  # [STAGES * 2, COLUMNS, SPAN]: the gate's, up's
    weights: gl.shared_memory_descriptor  # the same memory as [STAGES, 2 * COLUMNS, SPAN]
    barriers: BarrierRing

    @gluon.constexpr_function
    def __init__(self, x, halves, weights, barriers):
        self.x = x
        self.halves = halves
        self.weights = weights
        self.barriers = barriers


@gluon.jit
def _make_ring(dtype: gl.constexpr):
    x = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, SPAN], LAYOUT)
    halves = gl.allocate_shared_memory(dtype, [STAGES * 2, COLUMNS, SPAN], LAYOUT)
    weights = reinterpret(halves, [STAGES, 2 * COLUMNS, SPAN])
    return OperandRing(x, halves, weights, make_barrier_ring(STAGES, CONSUMERS))


@gluon.jit
def _produce(tiles, ring, x_desc, weight_desc, num_columns):
    BYTES: gl.constexpr = (CONSUMERS * ROWS + 2 * COLUMNS) * SPAN * 2
    done = 0  # pieces, those of earlier tiles included
    for tile in range(gl.program_id(0), tiles.number(), gl.num_programs(0)):
        first_row, first_column = tiles.locate(tile)
        for piece in range(tiles.num_pieces):
            slot, full = ring.barriers.slot(done), ring.barriers.full_barrier(done)
            ring.barriers.wait_free(done)
            mbarrier.expect(full, BYTES)
            for half in gl.static_range(2):
                at = [first_column + half * num_columns, piece * SPAN]
                tma_load(weight_desc, at, full, ring.halves.index(slot * 2 + half))
            for consumer in gl.static_range(CONSUMERS):
                at = [first_row + consumer * ROWS, piece * SPAN]
                tma_load(x_desc, at, full, ring.x.index(slot * CONSUMERS + consumer))
            done += 1


@gluon.jit
def _consume(tiles, ring, y_desc, y_tiles, ME: gl.constexpr):
    """Consumer ME: ROWS rows of every tile, from row ME * ROWS on."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    y_tile = y_tiles.index(ME)
    done = 0
    for tile in range(gl.program_id(0), tiles.number(), gl.num_programs(0)):
        acc = gl.zeros([ROWS, 2 * COLUMNS], gl.float32, sums)
        for piece in range(tiles.num_pieces):
            slot = ring.barriers.slot(done)
            ring.barriers.wait_full(done)
            x, weights = ring.x.index(slot * CONSUMERS + ME), ring.weights.index(slot)
            acc = warpgroup_mma(x, weights.permute((1, 0)), acc, use_acc=piece > 0, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])  # the piece before has been read
            ring.barriers.release(done + STAGES - 1, pred=piece > 0)
            done += 1
        acc = warpgroup_mma_wait(0, [acc])
        ring.barriers.release(done + STAGES - 1)

        gate, up = acc.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)).split()
        y = gl.convert_layout(gate / (1.0 + gl.exp2(gate * -LOG2_E)) * up, out, assert_trivial=True)
        first_row, first_column = tiles.locate(tile)
        tma.store_wait(0)  # the tile before has left shared memory
        wait_for_warps()
        y_tile.store(y.to(y_desc.dtype))
        fence_async_shared()
        wait_for_warps()
        tma_store(y_desc, [first_row + ME * ROWS, first_column], y_tile)  # writes no rows past the last
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_row_tiles", "num_columns", "num_pieces"])
def _swiglu_linear_kernel(
    x_desc, weight_desc, y_desc, num_row_tiles, num_columns, num_pieces,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ring = _make_ring(x_desc.dtype)
    tiles = Tiles(num_row_tiles, num_columns // COLUMNS, num_pieces)
    y_tiles = gl.allocate_shared_memory(y_desc.dtype, [CONSUMERS, ROWS, COLUMNS], LAYOUT)
    fence_async_shared()  # makes the barriers visible to the copy engine
    gl.warp_specialize(
        [(_consume, (tiles, ring, y_desc, y_tiles, 0)), (_consume, (tiles, ring, y_desc, y_tiles, 1)),
         (_produce, (tiles, ring, x_desc, weight_desc, num_columns))],
        [4, 1], [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def swiglu_linear_hopper(x: Tensor, weight: Tensor) -> Tensor:
    """Raises ValueError unless `fits_hopper`; takes less work, too, than it would be faster for."""
    if not fits_hopper(x, weight):
        given = f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
        raise ValueError(f"{given}: use the library's product and headrace.kernels.dense.swiglu")
    M, I = x.shape  # noqa: E741
    num_columns = weight.shape[0] // 2
    y = torch.empty((M, num_columns), dtype=x.dtype, device=x.device)
    consumer_registers, producer_registers = registers(CONSUMERS.value)
    _swiglu_linear_kernel[(min(num_tiles(M, num_columns), num_multiprocessors(x.device)),)](
        described(x, ROWS.value, SPAN.value), described(weight, COLUMNS.value, SPAN.value),
        described(y, ROWS.value, COLUMNS.value), cdiv(M, CONSUMERS.value * ROWS.value), num_columns, I // SPAN.value,
        REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        num_warps=4, maxnreg=launch_registers(CONSUMERS.value),
    )  # fmt: skip
    return y


def num_tiles(M: int, num_columns: int) -> int:
    return cdiv(M, CONSUMERS.value * ROWS.value) * (num_columns // COLUMNS.value)


def fills_the_chip(M: int, num_columns: int, multiprocessors: int) -> bool:
    """True if so many tiles leave few programs, one a multiprocessor, without one in their last round."""
    tiles = num_tiles(M, num_columns)
    return tiles >= LEAST_FULL * cdiv(tiles, multiprocessors) * multiprocessors


def fits_hopper(x: Tensor, weight: Tensor) -> bool:
    """True if Hopper variants run here, and the kernel takes such sizes and memory."""
    return runs_hopper(x) and has_whole_tiles(x, weight)


def has_whole_tiles(x: Tensor, weight: Tensor) -> bool:
    """True if the kernel takes such sizes and memory: see Contract."""
    return weight.shape[0] % (2 * COLUMNS.value) == 0 and can_be_copied(x, weight)


def is_faster_on_hopper(x: Tensor, weight: Tensor) -> bool:
    """True if it fits, and is work enough to be faster than the library's product and swiglu.py."""
    return fits_hopper(x, weight) and fills_the_chip(len(x), weight.shape[0] // 2, num_multiprocessors(x.device))
