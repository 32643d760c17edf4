"""Consumers of `headrace.kernels.attention.prefill_hopper`: scores, softmax and weighted values of 64 rows each.

A step issues the scores' product of one tile of keys, then the product of the previous weights with their values, and
computes the new weights under it. While it waits for scores, the other consumers' products run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from headrace.kernels.lib.hopper import aggregate


@aggregate
class Queries:
    """Queries, and where results go.

    out_ptr       [T, H, D], or where contexts are split [T, H, splits, D] float32
    log_sum_ptr   [T, H, splits] float32, base 2: -inf for a row that sees no keys of the split, whose part is not read
    """

    q_ptr: gl.tensor
    out_ptr: gl.tensor
    log_sum_ptr: gl.tensor
    tiles: gl.shared_memory_descriptor  # [consumers' tiles, 64, D]
    stride_q: gl.tensor
    scale_log2: gl.tensor
    IS_SPLIT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q_ptr, out_ptr, log_sum_ptr, tiles, stride_q, scale_log2, IS_SPLIT):
        self.q_ptr = q_ptr
        self.out_ptr = out_ptr
        self.log_sum_ptr = log_sum_ptr
        self.tiles = tiles
        self.stride_q = stride_q
        self.scale_log2 = scale_log2
        self.IS_SPLIT = gl.constexpr(IS_SPLIT)


@gluon.jit
def consume(items, queries, keys, values, ME: gl.constexpr):
    """Consumer ME: the ME-th 64 rows of every item."""
    done = 0  # tiles of earlier items
    for round in range(items.num_rounds()):
        item = items.item_of_round(round)
        if item < items.num_items:
            done += _consume_item(items, queries, keys, values, done, item, ME)


@aggregate
class Rows:
    """A consumer's part of an item: 64 rows, tokens times padded heads, of one KV head."""

    kv_head: gl.tensor
    first_row: gl.tensor  # of the sequence
    first_token: gl.tensor
    length: gl.tensor  # the sequence's
    split: gl.tensor

    @gluon.constexpr_function
    def __init__(self, kv_head, first_row, first_token, length, split):
        self.kv_head = kv_head
        self.first_row = first_row
        self.first_token = first_token
        self.length = length
        self.split = split

    @gluon.jit
    def locate(self, sizes, layout: gl.constexpr):
        """Each one's row of the batch, int64, its head, and whether it exists."""
        row = gl.arange(0, 64, layout=layout)
        token, member = self.first_token + row // sizes.PADDED_GROUP, row % sizes.PADDED_GROUP
        is_row = (token < self.length) & (member < sizes.GROUP)
        return (self.first_row + token).to(gl.int64), self.kv_head * sizes.GROUP + member, is_row


@gluon.jit
def _consume_item(items, queries, keys, values, done, item, ME: gl.constexpr):
    """Attends to the tiles of an item; returns their number."""
    kv_head, split, sequence, first_row, length, first_token = items.locate(item)
    start = gl.load(items.start_ptr + sequence)
    first, last, _, num_tiles = items.keys(start, first_token, length, split)
    rows = Rows(kv_head, first_row, first_token + ME * 64 // items.sizes.PADDED_GROUP, length, split)
    if num_tiles > 0:
        acc, row_max, row_sum = _attend(queries, keys, values, done, first, last, rows, start, ME)
        _store_out(items, queries, acc, row_max, row_sum, rows)
    elif queries.IS_SPLIT:
        _store_nothing(items, queries, rows)
    return num_tiles


@gluon.jit
def _attend(queries, keys, values, done, first, last, rows, start, ME: gl.constexpr):
    """Attends to the tiles from `last` down to `first`; returns sums, maxima and each thread's sums of weights."""
    sizes = keys.sizes
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D, 16])
    q = _load_q(queries, sizes, rows)
    if sizes.D == 64:
        q_tile = gl.convert_layout(q, gl.DotOperandLayout(0, scores, 2))
    else:
        q_tile = queries.tiles.index(ME)
        q_tile.store(q)
        fence_async_shared()

    position = start + rows.first_token + gl.arange(0, 64, layout=gl.SliceLayout(1, scores)) // sizes.PADDED_GROUP
    row_max = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, scores))  # finite: a row may see none of a tile
    acc = gl.zeros([64, sizes.D], gl.float32, sums)
    keys.wait_full(done)
    score = _issue_scores(q_tile, keys, done)
    score = warpgroup_mma_wait(0, [score])
    keys.release(done)
    weight, row_sum, row_max, _ = _softmax(score, row_max, position, last * sizes.KEYS, queries.scale_log2, True)
    keys.wait_full(done + 1, last > first)
    # Tiles before this one need no mask.
    all_see = gl.maximum(gl.minimum((start + rows.first_token + 1) // sizes.KEYS, last), first)
    for step in range(1, last - all_see + 1):
        acc, weight, row_max, row_sum = _consume_tile(
            acc, weight, row_max, row_sum, q_tile, keys, values, position, queries.scale_log2, step, first, last, done,
            True,
        )  # fmt: skip
    for step in range(last - all_see + 1, last - first + 1):
        acc, weight, row_max, row_sum = _consume_tile(
            acc, weight, row_max, row_sum, q_tile, keys, values, position, queries.scale_log2, step, first, last, done,
            False,
        )  # fmt: skip
    end = done + last - first
    values.wait_full(end)
    rounded = gl.convert_layout(weight.to(values.tiles.dtype), gl.DotOperandLayout(0, sums, 2))
    acc = warpgroup_mma(rounded, values.tiles.index(end % sizes.STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    values.release(end)
    return acc, row_max, row_sum


@gluon.jit
def _consume_tile(
    acc, weight, row_max, row_sum, q, keys, values, position, scale_log2, step, first, last, done, MASKED: gl.constexpr
):
    """Computes the weights of tile last - step, whose keys have arrived, under the previous tile's product."""
    sizes = keys.sizes
    sums: gl.constexpr = acc.type.layout
    tile = done + step
    rounded = gl.convert_layout(weight.to(values.tiles.dtype), gl.DotOperandLayout(0, sums, 2))
    score = _issue_scores(q, keys, tile)
    values.wait_full(tile - 1)
    acc = warpgroup_mma(rounded, values.tiles.index((tile - 1) % sizes.STAGES), acc, is_async=True)
    score = warpgroup_mma_wait(1, [score])
    keys.release(tile)
    first_key = (last - step) * sizes.KEYS
    weight, weight_sum, row_max, shrink = _softmax(score, row_max, position, first_key, scale_log2, MASKED)
    row_sum = row_sum * gl.convert_layout(shrink, gl.SliceLayout(1, row_sum.type.layout))[:, None] + weight_sum
    # A wait is a loop, and the assembler moves nothing across it: without this one it would put the wait for the sums
    # before the exponentials.
    keys.wait_full(tile + 1, step < last - first)
    acc = warpgroup_mma_wait(0, [acc])
    values.release(tile - 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
    return acc, weight, row_max, row_sum


@gluon.jit
def _issue_scores(q, keys, tile):
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys.sizes.KEYS, 16])
    nothing = gl.zeros([64, keys.sizes.KEYS], gl.float32, scores)
    k = keys.tiles.index(tile % keys.sizes.STAGES).permute((1, 0))
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _softmax(score, row_max, position, first_key, scale_log2, MASKED: gl.constexpr):
    """Weights of a tile's keys; each thread's sum of them [64, 4]; the rows' new maxima; the factor for older sums."""
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
def _load_q(queries, sizes, rows):
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // sizes.D, sizes.D // 8], [4, 1], [1, 0])
    row, head, is_row = rows.locate(sizes, gl.SliceLayout(1, copy))
    column = gl.arange(0, sizes.D, layout=gl.SliceLayout(0, copy))
    place = (row * queries.stride_q + head * sizes.D)[:, None] + column[None, :]
    return gl.load(queries.q_ptr + place, mask=is_row[:, None], other=0.0)


@gluon.jit
def _store_out(items, queries, acc, row_max, row_sum, rows):
    sums: gl.constexpr = acc.type.layout
    sizes = items.sizes
    row, head, is_row = rows.locate(sizes, gl.SliceLayout(1, sums))
    place = (row * sizes.H + head) * items.splits + rows.split
    total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, sums))
    if queries.IS_SPLIT:
        has_keys = total > 0
        total = gl.where(has_keys, total, 1.0)
        log_sum = gl.convert_layout(row_max, gl.SliceLayout(1, sums)) + gl.log2(total)
        gl.store(queries.log_sum_ptr + place, gl.where(has_keys, log_sum, float("-inf")), mask=is_row)
    out = (acc / total[:, None]).to(queries.out_ptr.dtype.element_ty)
    column = gl.arange(0, sizes.D, layout=gl.SliceLayout(0, sums))
    gl.store(queries.out_ptr + (place * sizes.D)[:, None] + column[None, :], out, mask=is_row[:, None])


@gluon.jit
def _store_nothing(items, queries, rows):
    """A split without keys."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    sizes = items.sizes
    row, head, is_row = rows.locate(sizes, layout)
    place = (row * sizes.H + head) * items.splits + rows.split
    nothing = gl.full([64], float("-inf"), gl.float32, layout)
    gl.store(queries.log_sum_ptr + place, nothing, mask=is_row)
