"""Producer of `headrace.kernels.attention.prefill_hopper`, and the work list and rings that all its warps share.

Producer and consumers synchronise through mbarriers alone (`headrace.kernels.lib.hopper.BarrierRing`), counted over all
items of a program. An item is one split of the context for one KV head's rows, tokens times padded heads, of one
sequence; its tiles of keys are taken from the last to the first, so that only the first steps mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from headrace.kernels.lib.hopper import (
    LAYOUT,
    SPAN,
    BarrierRing,
    aggregate,
    make_barrier_ring,
    reinterpret,
    tma_load,
    wait_for_warps,
)

LEAST_TILES = gl.constexpr(16)  # of a split: shorter contexts are not worth a merge


@aggregate
class Sizes:
    """The kernel's constants."""

    H: gl.constexpr
    HKV: gl.constexpr
    GROUP: gl.constexpr  # query heads a KV head
    PADDED_GROUP: gl.constexpr  # to a power of two
    D: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    KEYS: gl.constexpr  # a tile
    STAGES: gl.constexpr
    TOKENS: gl.constexpr  # an item

    @gluon.constexpr_function
    def __init__(self, H, HKV, GROUP, PADDED_GROUP, D, BLOCK_SIZE, KEYS, STAGES, ROWS):
        self.H = gl.constexpr(H)
        self.HKV = gl.constexpr(HKV)
        self.GROUP = gl.constexpr(GROUP)
        self.PADDED_GROUP = gl.constexpr(PADDED_GROUP)
        self.D = gl.constexpr(D)
        self.BLOCK_SIZE = gl.constexpr(BLOCK_SIZE)
        self.KEYS = gl.constexpr(KEYS)
        self.STAGES = gl.constexpr(STAGES)
        self.TOKENS = gl.constexpr(ROWS // PADDED_GROUP)


@aggregate
class TileRing:
    """A ring of STAGES tiles of keys, or of values, in shared memory.

    A tile [KEYS, D] is made of pieces: a block's tokens, SPAN elements of each, which one bulk copy brings. Spans are
    outermost: the order in which the matrix units read a tile.
    """

    pieces: gl.shared_memory_descriptor  # [STAGES * D / SPAN * KEYS / BLOCK_SIZE, BLOCK_SIZE, SPAN]
    tiles: gl.shared_memory_descriptor  # the same memory as [STAGES, KEYS, D]
    barriers: BarrierRing
    sizes: Sizes

    @gluon.constexpr_function
    def __init__(self, pieces, tiles, barriers, sizes):
        self.pieces = pieces
        self.tiles = tiles
        self.barriers = barriers
        self.sizes = sizes

    @gluon.jit
    def wait_full(self, tile, pred=True):
        self.barriers.wait_full(tile, pred)

    @gluon.jit
    def wait_free(self, tile):
        self.barriers.wait_free(tile)

    @gluon.jit
    def release(self, tile):
        self.barriers.release(tile)

    @gluon.jit
    def expect(self, tile, NUM_BLOCKS: gl.constexpr, pred=True):
        bytes_a_block: gl.constexpr = self.sizes.BLOCK_SIZE * self.sizes.D * 2
        mbarrier.expect(self.barriers.full_barrier(tile), NUM_BLOCKS * bytes_a_block, pred)

    @gluon.jit
    def piece(self, tile, span, block):
        sizes = self.sizes
        return self.pieces.index(
            (tile % sizes.STAGES * (sizes.D // SPAN) + span) * (sizes.KEYS // sizes.BLOCK_SIZE) + block
        )

    @gluon.jit
    def load(self, desc, tile, block, row, column, pred=True):
        """Issues the copies of one of the tile's blocks, which begins at a row of the pool."""
        for span in gl.static_range(self.sizes.D // SPAN):
            at = [row, column + span * SPAN]
            tma_load(desc, at, self.barriers.full_barrier(tile), self.piece(tile, span, block), pred=pred)


@gluon.jit
def make_tile_ring(dtype: gl.constexpr, sizes, CONSUMERS: gl.constexpr):
    PIECES: gl.constexpr = sizes.STAGES * sizes.KEYS * sizes.D // (sizes.BLOCK_SIZE * SPAN)
    pieces = gl.allocate_shared_memory(dtype, [PIECES, sizes.BLOCK_SIZE, SPAN], LAYOUT)
    tiles = reinterpret(pieces, [sizes.STAGES, sizes.KEYS, sizes.D])
    return TileRing(pieces, tiles, make_barrier_ring(sizes.STAGES, CONSUMERS), sizes)


@aggregate
class Items:
    """Work list of a launch: which items a program takes, and where their rows are."""

    first_row_ptr: gl.tensor  # as in `PagedChunks`
    start_ptr: gl.tensor
    num_items: gl.tensor
    num_sequences: gl.tensor
    splits: gl.tensor  # of each context
    sizes: Sizes

    @gluon.constexpr_function
    def __init__(self, first_row_ptr, start_ptr, num_items, num_sequences, splits, sizes):
        self.first_row_ptr = first_row_ptr
        self.start_ptr = start_ptr
        self.num_items = num_items
        self.num_sequences = num_sequences
        self.splits = splits
        self.sizes = sizes

    @gluon.jit
    def num_rounds(self):
        return (self.num_items + gl.num_programs(0) - 1) // gl.num_programs(0)

    @gluon.jit
    def item_of_round(self, round):
        """This program's item: every other round runs backwards, so that long items even out."""
        forward = gl.program_id(0)
        within = gl.where(round % 2 == 0, forward, gl.num_programs(0) - 1 - forward)
        return round * gl.num_programs(0) + within

    @gluon.jit
    def locate(self, item):
        """KV head, split, sequence, its first row, its rows, the item's first token: the number of rows if it has none.

        Of a sequence late tokens (most keys) come first. Padding, a captured pass's last sequence, comes last: what is
        short or empty shall not take the place of an item in a round.
        """
        sizes = self.sizes
        kv_head, split = item % sizes.HKV, item // sizes.HKV % self.splits
        place = item // (sizes.HKV * self.splits)
        # Sequence i's tiles start at first_row[i] // TOKENS + i, which leaves each one a tile for its rest.
        sequence, behind = 0, self.num_sequences
        while behind - sequence > 1:
            middle = (sequence + behind) // 2
            is_before = gl.load(self.first_row_ptr + middle) // sizes.TOKENS + middle <= place
            sequence = gl.where(is_before, middle, sequence)
            behind = gl.where(is_before, behind, middle)
        first_row = gl.load(self.first_row_ptr + sequence)
        length = gl.load(self.first_row_ptr + sequence + 1) - first_row
        from_last = place - first_row // sizes.TOKENS - sequence
        from_first = (length + sizes.TOKENS - 1) // sizes.TOKENS - 1 - from_last
        first_token = gl.where(from_first < 0, length, from_first * sizes.TOKENS)
        return kv_head, split, sequence, first_row, length, first_token

    @gluon.jit
    def keys(self, start, first_token, length, split):
        """The first and the last tile of an item's keys, where these end, and the tiles' number, which may be 0."""
        sizes = self.sizes
        end = start + gl.minimum(first_token + sizes.TOKENS, length)
        num_tiles = gl.where(first_token < length, (end + sizes.KEYS - 1) // sizes.KEYS, 0)
        of_split = gl.maximum((num_tiles + self.splits - 1) // self.splits, LEAST_TILES)
        first = split * of_split
        behind = gl.minimum(first + of_split, num_tiles)
        return first, behind - 1, gl.minimum(end, behind * sizes.KEYS), gl.maximum(behind - first, 0)


# ---------------------------------------------------------------- the producer


@aggregate
class Pool:
    """Keys and values as the copy engine sees them: rows of one token's heads."""

    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    v_ptr: gl.tensor
    table_ptr: gl.tensor
    stride_table: gl.tensor
    block_rows: gl.tensor  # from one block to the next
    num_rows: gl.tensor  # copies of rows from here on bring zeros

    @gluon.constexpr_function
    def __init__(self, k_desc, v_desc, v_ptr, table_ptr, stride_table, block_rows, num_rows):
        self.k_desc = k_desc
        self.v_desc = v_desc
        self.v_ptr = v_ptr
        self.table_ptr = table_ptr
        self.stride_table = stride_table
        self.block_rows = block_rows
        self.num_rows = num_rows


@gluon.jit
def produce(items, pool, keys, values):
    """Copies the keys and values of every item's tiles, each as soon as a slot is free."""
    sizes = items.sizes
    BLOCKS: gl.constexpr = sizes.KEYS // sizes.BLOCK_SIZE
    done = 0  # tiles of earlier items
    for round in range(items.num_rounds()):
        item = items.item_of_round(round)
        if item < items.num_items:
            kv_head, split, sequence, _, length, first_token = items.locate(item)
            start = gl.load(items.start_ptr + sequence)
            _, last, end, num_tiles = items.keys(start, first_token, length, split)
            if num_tiles > 0:
                table_ptr = pool.table_ptr + sequence * pool.stride_table
                column = kv_head * sizes.D
                _produce_last(pool, keys, values, done, table_ptr, column, last * BLOCKS, end)
                for step in range(1, num_tiles):
                    tile = done + step
                    first_block = (last - step) * BLOCKS
                    keys.wait_free(tile)
                    keys.expect(tile, BLOCKS)
                    for i in gl.static_range(BLOCKS):
                        row = gl.load(table_ptr + first_block + i) * pool.block_rows
                        keys.load(pool.k_desc, tile, i, row, column)
                    values.wait_free(tile)
                    values.expect(tile, BLOCKS)
                    for i in gl.static_range(BLOCKS):
                        row = gl.load(table_ptr + first_block + i) * pool.block_rows
                        values.load(pool.v_desc, tile, i, row, column)
                done += num_tiles


@gluon.jit
def _produce_last(pool, keys, values, tile, table_ptr, column, first_block, end):
    """The last tile, perhaps at the sequence's end. Values past the end become zero: a weight of zero hides no NaN.

    The copy engine brings whole blocks: of the block that holds the end, the producer copies the values itself.
    """
    sizes = keys.sizes
    BLOCKS: gl.constexpr = sizes.KEYS // sizes.BLOCK_SIZE
    num_blocks = (end + sizes.BLOCK_SIZE - 1) // sizes.BLOCK_SIZE
    num_whole = end // sizes.BLOCK_SIZE
    keys.wait_free(tile)
    keys.expect(tile, BLOCKS)
    for i in gl.static_range(BLOCKS):
        is_held = first_block + i < num_blocks
        block = gl.load(table_ptr + first_block + i, mask=is_held, other=0)
        keys.load(pool.k_desc, tile, i, gl.where(is_held, block * pool.block_rows, pool.num_rows), column)
    values.wait_free(tile)
    if num_whole < num_blocks:
        _copy_part(pool, values, tile, table_ptr, column, num_whole, first_block, end)
    values.expect(tile, BLOCKS, num_whole == num_blocks)
    values.expect(tile, BLOCKS - 1, num_whole < num_blocks)
    for i in gl.static_range(BLOCKS):
        is_whole = first_block + i < num_whole
        block = gl.load(table_ptr + first_block + i, mask=is_whole, other=0)
        row = gl.where(is_whole, block * pool.block_rows, pool.num_rows)
        values.load(pool.v_desc, tile, i, row, column, is_whole | (first_block + i >= num_blocks))


@gluon.jit
def _copy_part(pool, values, tile, table_ptr, column, block, first_block, end):
    sizes = values.sizes
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    token = gl.arange(0, sizes.BLOCK_SIZE, layout=gl.SliceLayout(1, copy))
    element = gl.arange(0, SPAN, layout=gl.SliceLayout(0, copy))
    row = gl.load(table_ptr + block).to(gl.int64) * pool.block_rows + token
    place = (row * (sizes.HKV * sizes.D) + column)[:, None] + element[None, :]
    is_held = (block * sizes.BLOCK_SIZE + token < end)[:, None]
    for span in range(sizes.D // SPAN):
        part = gl.load(pool.v_ptr + place + span * SPAN, mask=is_held, other=0.0)
        values.piece(tile, span, block - first_block).store(part)
    fence_async_shared()
    wait_for_warps()
