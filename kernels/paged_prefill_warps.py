"""What the warps of `kernels.paged_prefill_hopper` do: one producer's copies, and consumers' products and weights.

They meet at barriers in shared memory alone. A ring has places for a few tiles, and for each place two barriers:
`full`, where the copy engine counts the bytes that came, and `free`, where consumers say that they have read. Tile n of
a program, over all of its items, takes place n % STAGES in round n // STAGES. An item is one KV head's ROWS rows,
tokens times padded heads, of one sequence; its tiles of keys are taken from the last to the first, so that only the
first steps mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate  # Triton 3.9 also calls it gluon.aggregate

# Triton 3.6 calls them by other names.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
wait_for_warp = getattr(gl, "barrier", None) or gl.thread_barrier
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

SPAN = gl.constexpr(64)  # elements of a row that the copy engine lays out together: 128 bytes
LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


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
    full: gl.shared_memory_descriptor  # barriers
    free: gl.shared_memory_descriptor
    form: Form

    @gluon.constexpr_function
    def __init__(self, pieces, tiles, full, free, form):
        self.pieces = pieces
        self.tiles = tiles
        self.full = full
        self.free = free
        self.form = form

    @gluon.jit
    def wait_full(self, tile, pred=True):
        mbarrier.wait(self.full.index(tile % self.form.STAGES), tile // self.form.STAGES & 1, pred)

    @gluon.jit
    def wait_free(self, tile):
        mbarrier.wait(self.free.index(tile % self.form.STAGES), (tile // self.form.STAGES + 1) & 1)

    @gluon.jit
    def release(self, tile):
        mbarrier.arrive(self.free.index(tile % self.form.STAGES), count=1)

    @gluon.jit
    def expect(self, tile, NUM_BLOCKS: gl.constexpr, pred=True):
        bytes_a_block: gl.constexpr = self.form.BLOCK_SIZE * self.form.D * 2
        mbarrier.expect(self.full.index(tile % self.form.STAGES), NUM_BLOCKS * bytes_a_block, pred)

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
                desc, [row, column + span * SPAN], self.full.index(tile % self.form.STAGES),
                self.piece(tile, span, block), pred=pred,
            )  # fmt: skip


@gluon.jit
def make_ring(dtype: gl.constexpr, form, CONSUMERS: gl.constexpr):
    PIECES: gl.constexpr = form.STAGES * form.KEYS * form.D // (form.BLOCK_SIZE * SPAN)
    pieces = gl.allocate_shared_memory(dtype, [PIECES, form.BLOCK_SIZE, SPAN], LAYOUT)
    if HAS_REINTERPRET:
        tiles = pieces.reinterpret(dtype, [form.STAGES, form.KEYS, form.D], LAYOUT)
    else:
        tiles = pieces._reinterpret(dtype, [form.STAGES, form.KEYS, form.D], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [form.STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [form.STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(form.STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return Ring(pieces, tiles, full, free, form)


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
    wait_for_warp()


# ---------------------------------------------------------------- consumers


@aggregate
class Queries:
    q_ptr: gl.tensor
    out_ptr: gl.tensor
    tiles: gl.shared_memory_descriptor  # [consumers' tiles, 64, D]
    stride_q: gl.tensor
    scale_log2: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q_ptr, out_ptr, tiles, stride_q, scale_log2):
        self.q_ptr = q_ptr
        self.out_ptr = out_ptr
        self.tiles = tiles
        self.stride_q = stride_q
        self.scale_log2 = scale_log2


@gluon.jit
def consume(items, queries, keys, values, ME: gl.constexpr):
    """Tile ME of 64 rows of every item."""
    form = items.form
    done = 0  # tiles of earlier items
    for round in range(items.num_rounds()):
        item = items.of_round(round)
        if item < items.num_items:
            kv_head, sequence, first_row, length, first_token = items.locate(item)
            if first_token < length:
                start = gl.load(items.start_ptr + sequence)
                last = (start + gl.minimum(first_token + form.TOKENS, length) - 1) // form.KEYS
                first_token += ME * 64 // form.PADDED_GROUP
                _consume_item(queries, keys, values, done, last, kv_head, first_row, first_token, length, start, ME)
                done += last + 1


@gluon.jit
def _consume_item(queries, keys, values, done, last, kv_head, first_row, first_token, length, start, ME: gl.constexpr):
    form = keys.form
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.D, 16])
    q = _load_q(queries, form, kv_head, first_row, first_token, length)
    if form.D == 64:
        q_tile = gl.convert_layout(q, gl.DotOperandLayout(0, scores, 2))
    else:
        q_tile = queries.tiles.index(ME)
        q_tile.store(q)
        fence_async_shared()

    position = start + first_token + gl.arange(0, 64, layout=gl.SliceLayout(1, scores)) // form.PADDED_GROUP
    row_max = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, scores))  # finite: a row may see none of a tile
    acc = gl.zeros([64, form.D], gl.float32, sums)
    keys.wait_full(done)
    score = _ask_scores(q_tile, keys, done)
    score = warpgroup_mma_wait(0, [score])
    keys.release(done)
    weight, row_sum, row_max, _ = _softmax(score, row_max, position, last * form.KEYS, queries.scale_log2, True)
    keys.wait_full(done + 1, last > 0)
    all_see = gl.minimum((start + first_token + 1) // form.KEYS, last)  # tiles before this one need no mask
    for step in range(1, last - all_see + 1):
        acc, weight, row_max, row_sum = _consume_tile(
            acc, weight, row_max, row_sum, q_tile, keys, values, position, queries.scale_log2, step, last, done, True
        )
    for step in range(last - all_see + 1, last + 1):
        acc, weight, row_max, row_sum = _consume_tile(
            acc, weight, row_max, row_sum, q_tile, keys, values, position, queries.scale_log2, step, last, done, False
        )
    values.wait_full(done + last)
    rounded = gl.convert_layout(weight.to(values.tiles.dtype), gl.DotOperandLayout(0, sums, 2))
    acc = warpgroup_mma(rounded, values.tiles.index((done + last) % form.STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    values.release(done + last)
    _store_out(queries, form, acc, row_sum, kv_head, first_row, first_token, length)


@gluon.jit
def _consume_tile(
    acc, weight, row_max, row_sum, q, keys, values, position, scale_log2, step, last, done, MASKED: gl.constexpr
):
    """Weights of tile last - step, whose keys are there, under the product of those of the tile behind it."""
    form = keys.form
    sums: gl.constexpr = acc.type.layout
    tile = done + step
    rounded = gl.convert_layout(weight.to(values.tiles.dtype), gl.DotOperandLayout(0, sums, 2))
    score = _ask_scores(q, keys, tile)
    values.wait_full(tile - 1)
    acc = warpgroup_mma(rounded, values.tiles.index((tile - 1) % form.STAGES), acc, is_async=True)
    score = warpgroup_mma_wait(1, [score])
    keys.release(tile)
    first_key = (last - step) * form.KEYS
    weight, weight_sum, row_max, shrink = _softmax(score, row_max, position, first_key, scale_log2, MASKED)
    row_sum = row_sum * gl.convert_layout(shrink, gl.SliceLayout(1, row_sum.type.layout))[:, None] + weight_sum
    # This wait is a loop, which the assembler moves nothing across: without it the sums would be waited for before
    # the exponentials.
    keys.wait_full(tile + 1, step < last)
    acc = warpgroup_mma_wait(0, [acc])
    values.release(tile - 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
    return acc, weight, row_max, row_sum


@gluon.jit
def _ask_scores(q, keys, tile):
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys.form.KEYS, 16])
    nothing = gl.zeros([64, keys.form.KEYS], gl.float32, scores)
    k = keys.tiles.index(tile % keys.form.STAGES).permute((1, 0))
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _softmax(score, row_max, position, first_key, scale_log2, MASKED: gl.constexpr):
    """Weights of a tile's keys; each thread's sum of them [64, 4]; their maximum; by how much older sums shrink."""
    KEYS: gl.constexpr = score.shape[1]
    if MASKED:
        columns: gl.constexpr = gl.SliceLayout(0, score.type.layout)
        key = first_key + gl.arange(0, KEYS, layout=columns)
        score = gl.where(key[None, :] <= position[:, None], score, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(score, 1) * scale_log2)
    weight = gl.exp2(score * scale_log2 - new_max[:, None])
    thread_sum = gl.sum(gl.sum(weight.reshape([64, KEYS // 8, 4, 2]), 3), 1)
    return weight, thread_sum, new_max, gl.exp2(row_max - new_max)


@gluon.jit
def _place(form, kv_head, first_row, first_token, length, stride_row, layout: gl.constexpr):
    """Where 64 rows' elements stand, tokens times padded heads, and which rows there are."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, form.D, layout=gl.SliceLayout(0, layout))
    token, member = first_token + row // form.PADDED_GROUP, row % form.PADDED_GROUP
    head_d = ((kv_head * form.GROUP + member) * form.D)[:, None] + column[None, :]
    is_row = (token < length) & (member < form.GROUP)
    return (first_row + token).to(gl.int64)[:, None] * stride_row + head_d, is_row[:, None]


@gluon.jit
def _load_q(queries, form, kv_head, first_row, first_token, length):
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // form.D, form.D // 8], [4, 1], [1, 0])
    place, is_row = _place(form, kv_head, first_row, first_token, length, queries.stride_q, copy)
    return gl.load(queries.q_ptr + place, mask=is_row, other=0.0)


@gluon.jit
def _store_out(queries, form, acc, row_sum, kv_head, first_row, first_token, length):
    sums: gl.constexpr = acc.type.layout
    out = acc / gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, sums))[:, None]
    place, is_row = _place(form, kv_head, first_row, first_token, length, form.H * form.D, sums)
    gl.store(queries.out_ptr + place, out.to(queries.out_ptr.dtype.element_ty), mask=is_row)


# ---------------------------------------------------------------- consumers of two tiles of rows


@gluon.jit
def consume_pair(items, queries, keys, values, ME: gl.constexpr):
    """Tiles 2 * ME and 2 * ME + 1 of 64 rows of every item: one's weights are made while the other's products run."""
    form = items.form
    done = 0  # tiles of earlier items
    for round in range(items.num_rounds()):
        item = items.of_round(round)
        if item < items.num_items:
            kv_head, sequence, first_row, length, first_token = items.locate(item)
            if first_token < length:
                start = gl.load(items.start_ptr + sequence)
                last = (start + gl.minimum(first_token + form.TOKENS, length) - 1) // form.KEYS
                first_token += ME * 128 // form.PADDED_GROUP
                _consume_item_by_pair(
                    queries, keys, values, done, last, kv_head, first_row, first_token, length, start, ME
                )
                done += last + 1


@gluon.jit
def _consume_item_by_pair(
    queries, keys, values, done, last, kv_head, first_row, first_token, length, start, ME: gl.constexpr
):
    form = keys.form
    TOKENS: gl.constexpr = 64 // form.PADDED_GROUP  # from the first tile of rows to the second
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.D, 16])
    q_a = queries.tiles.index(2 * ME)
    q_b = queries.tiles.index(2 * ME + 1)
    q_a.store(_load_q(queries, form, kv_head, first_row, first_token, length))
    q_b.store(_load_q(queries, form, kv_head, first_row, first_token + TOKENS, length))
    fence_async_shared()

    position = start + first_token + gl.arange(0, 64, layout=gl.SliceLayout(1, scores)) // form.PADDED_GROUP
    lowest = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, scores))  # finite: a row may see none of a tile
    keys.wait_full(done)
    score_a = _ask_scores(q_a, keys, done)
    score_b = _ask_scores(q_b, keys, done)
    score_a, score_b = warpgroup_mma_wait(0, [score_a, score_b])
    keys.release(done)
    first_key = last * form.KEYS
    weight_a, sum_a, max_a, shrink_a = _softmax(score_a, lowest, position, first_key, queries.scale_log2, True)
    weight_b, sum_b, max_b, shrink_b = _softmax(score_b, lowest, position + TOKENS, first_key, queries.scale_log2, True)
    a = (gl.zeros([64, form.D], gl.float32, sums), weight_a, shrink_a, max_a, sum_a)
    b = (gl.zeros([64, form.D], gl.float32, sums), weight_b, shrink_b, max_b, sum_b)
    keys.wait_full(done + 1, last > 0)
    all_see = gl.minimum((start + first_token + 1) // form.KEYS, last)  # tiles before this one need no mask
    for step in range(1, last - all_see + 1):
        a, b = _consume_tile_by_pair(
            a, b, q_a, q_b, keys, values, position, queries.scale_log2, step, last, done, TOKENS, True
        )
    for step in range(last - all_see + 1, last + 1):
        a, b = _consume_tile_by_pair(
            a, b, q_a, q_b, keys, values, position, queries.scale_log2, step, last, done, TOKENS, False
        )
    acc_a, weight_a, shrink_a, _, sum_a = a
    acc_b, weight_b, shrink_b, _, sum_b = b
    values.wait_full(done + last)
    v = values.tiles.index((done + last) % form.STAGES)
    acc_a = _ask_sums(acc_a, weight_a, shrink_a, v)
    acc_b = _ask_sums(acc_b, weight_b, shrink_b, v)
    acc_a, acc_b = warpgroup_mma_wait(0, [acc_a, acc_b])
    values.release(done + last)
    _store_out(queries, form, acc_a, sum_a, kv_head, first_row, first_token, length)
    _store_out(queries, form, acc_b, sum_b, kv_head, first_row, first_token + TOKENS, length)


@gluon.jit
def _ask_sums(acc, weight, shrink, v):
    sums: gl.constexpr = acc.type.layout
    rounded = gl.convert_layout(weight.to(v.dtype), gl.DotOperandLayout(0, sums, 2))
    return warpgroup_mma(rounded, v, acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None], is_async=True)


@gluon.jit
def _consume_tile_by_pair(
    a, b, q_a, q_b, keys, values, position, scale_log2, step, last, done, TOKENS: gl.constexpr, MASKED: gl.constexpr
):
    acc_a, weight_a, shrink_a, max_a, sum_a = a
    acc_b, weight_b, shrink_b, max_b, sum_b = b
    form = keys.form
    tile = done + step
    first_key = (last - step) * form.KEYS
    score_a = _ask_scores(q_a, keys, tile)
    score_b = _ask_scores(q_b, keys, tile)
    values.wait_full(tile - 1)
    v = values.tiles.index((tile - 1) % form.STAGES)
    acc_a = _ask_sums(acc_a, weight_a, shrink_a, v)
    acc_b = _ask_sums(acc_b, weight_b, shrink_b, v)
    score_a = warpgroup_mma_wait(3, [score_a])
    weight_a, more_a, max_a, shrink_a = _softmax(score_a, max_a, position, first_key, scale_log2, MASKED)
    sum_a = sum_a * gl.convert_layout(shrink_a, gl.SliceLayout(1, sum_a.type.layout))[:, None] + more_a
    # The waits for tiles are loops, which the assembler moves nothing across: without them it would wait for products
    # before the exponentials.
    values.wait_full(tile - 1)
    score_b = warpgroup_mma_wait(2, [score_b])
    keys.release(tile)
    weight_b, more_b, max_b, shrink_b = _softmax(score_b, max_b, position + TOKENS, first_key, scale_log2, MASKED)
    sum_b = sum_b * gl.convert_layout(shrink_b, gl.SliceLayout(1, sum_b.type.layout))[:, None] + more_b
    keys.wait_full(tile + 1, step < last)
    acc_a, acc_b = warpgroup_mma_wait(0, [acc_a, acc_b])
    values.release(tile - 1)
    return (acc_a, weight_a, shrink_a, max_a, sum_a), (acc_b, weight_b, shrink_b, max_b, sum_b)
