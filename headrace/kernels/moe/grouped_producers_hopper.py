"""Tiles of grouped products on Hopper (Gluon), and the producer that copies what they multiply.

A piece is SPAN bytes of each row of a tile: those of x, CONSUMERS * ROWS of them, and of W, 2 * COLUMNS. Rows of W, and
of x where they lie grouped, are bulk copies (TMA). Gathered rows, those of tokens, are copied 16 bytes a thread by all
of the producer's warps: the copy engine of Hopper takes no list of rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from headrace.kernels.lib.hopper import (
    BarrierRing,
    aggregate,
    async_load,
    make_barrier_ring,
    reinterpret,
    tma_load,
)
from headrace.kernels.moe.grouping import UNIT

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(UNIT)  # of a consumer
COLUMNS = gl.constexpr(128)  # of one half of the sums: gate or up, or left or right
SPAN_BYTES = gl.constexpr(128)  # one swizzle of the copy engine
GATHERING_WARPS = gl.constexpr(4)


@aggregate
class Tiles:
    """The tiles of y: this program's, one after the other. A tile's columns lie side by side in time."""

    tiles_ptr: gl.tensor
    number: gl.tensor
    num_column_tiles: gl.tensor
    num_pieces: gl.tensor  # of each tile
    rows_an_expert: gl.tensor  # of W
    second_half: gl.tensor  # rows of W from the first half of a tile's sums to the second

    @gluon.constexpr_function
    def __init__(self, tiles_ptr, number, num_column_tiles, num_pieces, rows_an_expert, second_half):
        self.tiles_ptr = tiles_ptr
        self.number = number
        self.num_column_tiles = num_column_tiles
        self.num_pieces = num_pieces
        self.rows_an_expert = rows_an_expert
        self.second_half = second_half

    @gluon.jit
    def locate(self, tile):
        """A tile's expert, first row and number of rows; none past the last tile."""
        at = self.tiles_ptr + tile // self.num_column_tiles * 3
        is_tile = tile < self.number
        expert = gl.load(at, mask=is_tile, other=0)
        first_row = gl.load(at + 1, mask=is_tile, other=0)
        return expert, first_row, gl.load(at + 2, mask=is_tile, other=0)

    @gluon.jit
    def column(self, tile, TILE_COLUMNS: gl.constexpr):
        """The tile's first column of y."""
        return tile % self.num_column_tiles * TILE_COLUMNS

    @gluon.jit
    def has_both_halves(self, tile, TILE_COLUMNS: gl.constexpr):
        """False if the second half of its sums lies past y's last column."""
        return self.column(tile, TILE_COLUMNS) + self.second_half < self.rows_an_expert


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
def make_ring(weight_desc, STAGES: gl.constexpr, GATHERED: gl.constexpr):
    SPAN: gl.constexpr = weight_desc.block_shape[1]
    ARRIVALS: gl.constexpr = 1 + 32 * GATHERING_WARPS if GATHERED else 1
    x = gl.allocate_shared_memory(weight_desc.dtype, [STAGES * CONSUMERS, ROWS, SPAN], weight_desc.layout)
    halves = gl.allocate_shared_memory(weight_desc.dtype, [STAGES * 2, COLUMNS, SPAN], weight_desc.layout)
    weights = reinterpret(halves, [STAGES, 2 * COLUMNS, SPAN])
    return OperandRing(x, halves, weights, make_barrier_ring(STAGES, CONSUMERS, ARRIVALS))


@gluon.jit
def _load_weights(tiles, ring, weight_desc, first_weight, has_both, piece, done):
    SPAN: gl.constexpr = weight_desc.block_shape[1]
    slot, full = ring.barriers.slot(done), ring.barriers.full_barrier(done)
    tma_load(weight_desc, [first_weight, piece * SPAN], full, ring.halves.index(slot * 2))
    at = [first_weight + tiles.second_half, piece * SPAN]
    tma_load(weight_desc, at, full, ring.halves.index(slot * 2 + 1), pred=has_both)


@gluon.jit
def produce(tiles, ring, x_desc, weight_desc, TILE_COLUMNS: gl.constexpr):
    """Copies rows of x that lie grouped: one warp issues bulk copies."""
    HALF_BYTES: gl.constexpr = COLUMNS * SPAN_BYTES
    X_BYTES: gl.constexpr = ROWS * SPAN_BYTES
    SPAN: gl.constexpr = weight_desc.block_shape[1]
    done = 0  # pieces, those of earlier tiles included
    expert, first_row, count = tiles.locate(gl.program_id(0))
    for tile in range(gl.program_id(0), tiles.number, gl.num_programs(0)):
        next_expert, next_row, next_count = tiles.locate(tile + gl.num_programs(0))  # asked for a tile ahead
        first_weight = expert * tiles.rows_an_expert + tiles.column(tile, TILE_COLUMNS)
        has_both = tiles.has_both_halves(tile, TILE_COLUMNS)
        for piece in range(tiles.num_pieces):
            slot, full = ring.barriers.slot(done), ring.barriers.full_barrier(done)
            ring.barriers.wait_free(done)
            for halves in gl.static_range(1, 3):
                for units in gl.static_range(1, CONSUMERS + 1):
                    is_it = (has_both == (halves == 2)) & ((count > ROWS) == (units == 2))
                    mbarrier.expect(full, halves * HALF_BYTES + units * X_BYTES, is_it)
            _load_weights(tiles, ring, weight_desc, first_weight, has_both, piece, done)
            for consumer in gl.static_range(CONSUMERS):
                at = [first_row + consumer * ROWS, piece * SPAN]
                target = ring.x.index(slot * CONSUMERS + consumer)
                tma_load(x_desc, at, full, target, pred=consumer * ROWS < count)
            done += 1
        expert, first_row, count = next_expert, next_row, next_count


@gluon.jit
def produce_gathered(tiles, ring, x_ptr, stride_x, token_ptr, weight_desc, TILE_COLUMNS: gl.constexpr):
    """Copies tokens' rows of x by a warp group, and zeros into what a unit of rows lacks."""
    HALF_BYTES: gl.constexpr = COLUMNS * SPAN_BYTES
    SPAN: gl.constexpr = weight_desc.block_shape[1]
    copy: gl.constexpr = gl.BlockedLayout([1, SPAN // 8], [4, 8], [GATHERING_WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy))
    column = gl.arange(0, SPAN, layout=gl.SliceLayout(0, copy))
    done = 0
    expert, first_row, count = tiles.locate(gl.program_id(0))
    for tile in range(gl.program_id(0), tiles.number, gl.num_programs(0)):
        next_expert, next_row, next_count = tiles.locate(tile + gl.num_programs(0))
        first_weight = expert * tiles.rows_an_expert + tiles.column(tile, TILE_COLUMNS)
        has_both = tiles.has_both_halves(tile, TILE_COLUMNS)
        upper = gl.load(token_ptr + first_row + row, mask=row < count, other=0)
        lower = gl.load(token_ptr + first_row + ROWS + row, mask=row + ROWS < count, other=0)
        # In 32 bits: the producer has few registers.
        upper_place = (upper * stride_x)[:, None] + column[None, :]
        lower_place = (lower * stride_x)[:, None] + column[None, :]
        for piece in range(tiles.num_pieces):
            slot, full = ring.barriers.slot(done), ring.barriers.full_barrier(done)
            ring.barriers.wait_free(done)
            mbarrier.expect(full, 2 * HALF_BYTES, has_both)
            mbarrier.expect(full, HALF_BYTES, not has_both)
            _load_weights(tiles, ring, weight_desc, first_weight, has_both, piece, done)
            piece_ptr = x_ptr + piece * SPAN
            async_load(ring.x.index(slot * CONSUMERS), piece_ptr + upper_place, mask=(row < count)[:, None])
            if count > ROWS:
                rest = (row + ROWS < count)[:, None]
                async_load(ring.x.index(slot * CONSUMERS + 1), piece_ptr + lower_place, mask=rest)
            async_copy.mbarrier_arrive(full, increment_count=False)
            done += 1
        expert, first_row, count = next_expert, next_row, next_count
