"""What the warps of `headrace.kernels.attention.prefill_hopper` share, and what its producer does: it copies keys and
values.

It and the consumers meet at barriers in shared memory alone: a ring has places for a few tiles, which take turns
(`headrace.kernels.lib.hopper.Turns`), counted over all items of a program. An item is one KV head's rows, tokens times
padded heads, of one sequence; its tiles of keys are taken from the last to the first, so that only the first steps
mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from headrace.kernels.lib.hopper import LAYOUT, SPAN, Turns, aggregate, make_turns, seen_as, tma_load, wait_for_warps


@aggregate
class Form:
    """Sizes that are known when compiling."""

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
class Ring:
    """Places for tiles of keys, or of values.

    A tile [KEYS, D] is made of pieces, each a block's tokens and SPAN elements of each: what the copy engine brings at
    once. Spans are outermost, as the matrix units read it.
    """

    pieces: gl.shared_memory_descriptor  # [STAGES * D / SPAN * KEYS / BLOCK_SIZE, BLOCK_SIZE, SPAN]
    tiles: gl.shared_memory_descriptor  # the same memory as [STAGES, KEYS, D]
    turns: Turns
    form: Form

    @gluon.constexpr_function
    def __init__(self, pieces, tiles, turns, form):
        self.pieces = pieces
        self.tiles = tiles
        self.turns = turns
        self.form = form

    @gluon.jit
    def wait_full(self, tile, pred=True):
        self.turns.wait_full(tile, pred)

    @gluon.jit
    def wait_free(self, tile):
        self.turns.wait_free(tile)

    @gluon.jit
    def release(self, tile):
        self.turns.release(tile)

    @gluon.jit
    def expect(self, tile, NUM_BLOCKS: gl.constexpr, pred=True):
        bytes_a_block: gl.constexpr = self.form.BLOCK_SIZE * self.form.D * 2
        mbarrier.expect(self.turns.filled(tile), NUM_BLOCKS * bytes_a_block, pred)

    @gluon.jit
    def piece(self, tile, span, block):
        form = self.form
        return self.pieces.index(
            (tile % form.STAGES * (form.D // SPAN) + span) * (form.KEYS // form.BLOCK_SIZE) + block
        )

    @gluon.jit
    def ask(self, desc, tile, block, row, column, pred=True):
        """For one of the tile's blocks, which stands from a row of the pool on."""
        for span in gl.static_range(self.form.D // SPAN):
            tma_load(
                desc, [row, column + span * SPAN], self.turns.filled(tile), self.piece(tile, span, block), pred=pred,
            )  # fmt: skip


@gluon.jit
def make_ring(dtype: gl.constexpr, form, CONSUMERS: gl.constexpr):
    PIECES: gl.constexpr = form.STAGES * form.KEYS * form.D // (form.BLOCK_SIZE * SPAN)
    pieces = gl.allocate_shared_memory(dtype, [PIECES, form.BLOCK_SIZE, SPAN], LAYOUT)
    tiles = seen_as(pieces, [form.STAGES, form.KEYS, form.D])
    return Ring(pieces, tiles, make_turns(form.STAGES, CONSUMERS), form)


@aggregate
class Items:
    """What a launch has to do, and where it stands."""

    first_row_ptr: gl.tensor  # as in `PagedChunks`
    start_ptr: gl.tensor
    num_items: gl.tensor
    num_sequences: gl.tensor
    form: Form

    @gluon.constexpr_function
    def __init__(self, first_row_ptr, start_ptr, num_items, num_sequences, form):
        self.first_row_ptr = first_row_ptr
        self.start_ptr = start_ptr
        self.num_items = num_items
        self.num_sequences = num_sequences
        self.form = form

    @gluon.jit
    def num_rounds(self):
        return (self.num_items + gl.num_programs(0) - 1) // gl.num_programs(0)

    @gluon.jit
    def of_round(self, round):
        """This program's item: every other round runs backwards, so that long items even out."""
        forward = gl.program_id(0)
        within = gl.where(round % 2 == 0, forward, gl.num_programs(0) - 1 - forward)
        return round * gl.num_programs(0) + within

    @gluon.jit
    def locate(self, item):
        """KV head, sequence, its first row, its rows, the item's first token. Late tokens have most keys: first."""
        kv_head = item % self.form.HKV
        place = self.num_items // self.form.HKV - 1 - item // self.form.HKV
        # Sequence i's tiles start at first_row[i] // TOKENS + i, which leaves room enough for each one's last tile.
        sequence, behind = 0, self.num_sequences
        while behind - sequence > 1:
            middle = (sequence + behind) // 2
            is_before = gl.load(self.first_row_ptr + middle) // self.form.TOKENS + middle <= place
            sequence = gl.where(is_before, middle, sequence)
            behind = gl.where(is_before, behind, middle)
        first_row = gl.load(self.first_row_ptr + sequence)
        length = gl.load(self.first_row_ptr + sequence + 1) - first_row
        first_token = (place - first_row // self.form.TOKENS - sequence) * self.form.TOKENS
        return kv_head, sequence, first_row, length, first_token


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
    num_rows: gl.tensor  # what is asked for from here on becomes zero

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
    """Asks for the keys and values of every item's tiles, as soon as there is a place."""
    form = items.form
    BLOCKS: gl.constexpr = form.KEYS // form.BLOCK_SIZE
    done = 0  # tiles of earlier items
    for round in range(items.num_rounds()):
        item = items.of_round(round)
        if item < items.num_items:
            kv_head, sequence, _, length, first_token = items.locate(item)
            if first_token < length:
                end = gl.load(items.start_ptr + sequence) + gl.minimum(first_token + form.TOKENS, length)
                last = (end - 1) // form.KEYS
                table_ptr = pool.table_ptr + sequence * pool.stride_table
                column = kv_head * form.D
                _produce_last(pool, keys, values, done, table_ptr, column, last * BLOCKS, end)
                for step in range(1, last + 1):
                    tile = done + step
                    first_block = (last - step) * BLOCKS
                    keys.wait_free(tile)
                    keys.expect(tile, BLOCKS)
                    for i in gl.static_range(BLOCKS):
                        row = gl.load(table_ptr + first_block + i) * pool.block_rows
                        keys.ask(pool.k_desc, tile, i, row, column)
                    values.wait_free(tile)
                    values.expect(tile, BLOCKS)
                    for i in gl.static_range(BLOCKS):
                        row = gl.load(table_ptr + first_block + i) * pool.block_rows
                        values.ask(pool.v_desc, tile, i, row, column)
                done += last + 1


@gluon.jit
def _produce_last(pool, keys, values, tile, table_ptr, column, first_block, end):
    """Of the tile at the sequence's end, values behind it become zero, for a weight of zero hides no NaN.

    The copy engine knows no end inside of a block: there the producer copies itself.
    """
    form = keys.form
    BLOCKS: gl.constexpr = form.KEYS // form.BLOCK_SIZE
    num_blocks = (end + form.BLOCK_SIZE - 1) // form.BLOCK_SIZE
    num_whole = end // form.BLOCK_SIZE
    keys.wait_free(tile)
    keys.expect(tile, BLOCKS)
    for i in gl.static_range(BLOCKS):
        is_held = first_block + i < num_blocks
        block = gl.load(table_ptr + first_block + i, mask=is_held, other=0)
        keys.ask(pool.k_desc, tile, i, gl.where(is_held, block * pool.block_rows, pool.num_rows), column)
    values.wait_free(tile)
    if num_whole < num_blocks:
        _copy_part(pool, values, tile, table_ptr, column, num_whole, first_block, end)
    values.expect(tile, BLOCKS, num_whole == num_blocks)
    values.expect(tile, BLOCKS - 1, num_whole < num_blocks)
    for i in gl.static_range(BLOCKS):
        is_whole = first_block + i < num_whole
        block = gl.load(table_ptr + first_block + i, mask=is_whole, other=0)
        row = gl.where(is_whole, block * pool.block_rows, pool.num_rows)
        values.ask(pool.v_desc, tile, i, row, column, is_whole | (first_block + i >= num_blocks))


@gluon.jit
def _copy_part(pool, values, tile, table_ptr, column, block, first_block, end):
    form = values.form
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    token = gl.arange(0, form.BLOCK_SIZE, layout=gl.SliceLayout(1, copy))
    element = gl.arange(0, SPAN, layout=gl.SliceLayout(0, copy))
    row = gl.load(table_ptr + block).to(gl.int64) * pool.block_rows + token
    place = (row * (form.HKV * form.D) + column)[:, None] + element[None, :]
    is_held = (block * form.BLOCK_SIZE + token < end)[:, None]
    for span in range(form.D // SPAN):
        part = gl.load(pool.v_ptr + place + span * SPAN, mask=is_held, other=0.0)
        values.piece(tile, span, block - first_block).store(part)
    fence_async_shared()
    wait_for_warps()
