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
    """Consumer ME: the ME-th 64 rows of every item."""
    sizes = items.sizes
    done = 0  # tiles of earlier items
    for round in range(items.num_rounds()):
        item = items.item_of_round(round)
        if item < items.num_items:
            kv_head, sequence, first_row, length, first_token = items.locate(item)
            if first_token < length:
                start = gl.load(items.start_ptr + sequence)
                last = (start + gl.minimum(first_token + sizes.TOKENS, length) - 1) // sizes.KEYS
                first_token += ME * 64 // sizes.PADDED_GROUP
                _consume_item(queries, keys, values, done, last, kv_head, first_row, first_token, length, start, ME)
                done += last + 1


@gluon.jit
def _consume_item(queries, keys, values, done, last, kv_head, first_row, first_token, length, start, ME: gl.constexpr):
    sizes = keys.sizes
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D, 16])
    q = _load_q(queries, sizes, kv_head, first_row, first_token, length)
    if sizes.D == 64:
        q_tile = gl.convert_layout(q, gl.DotOperandLayout(0, scores, 2))
    else:
        q_tile = queries.tiles.index(ME)
        q_tile.store(q)
        fence_async_shared()

    position = start + first_token + gl.arange(0, 64, layout=gl.SliceLayout(1, scores)) // sizes.PADDED_GROUP
    row_max = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, scores))  # finite: a row may see none of a tile
    acc = gl.zeros([64, sizes.D], gl.float32, sums)
    keys.wait_full(done)
    score = _issue_scores(q_tile, keys, done)
    score = warpgroup_mma_wait(0, [score])
    keys.release(done)
    weight, row_sum, row_max, _ = _softmax(score, row_max, position, last * sizes.KEYS, queries.scale_log2, True)
    keys.wait_full(done + 1, last > 0)
    all_see = gl.minimum((start + first_token + 1) // sizes.KEYS, last)  # tiles before this one need no mask
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
    acc = warpgroup_mma(rounded, values.tiles.index((done + last) % sizes.STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    values.release(done + last)
    _store_out(queries, sizes, acc, row_sum, kv_head, first_row, first_token, length)


@gluon.jit
def _consume_tile(
    acc, weight, row_max, row_sum, q, keys, values, position, scale_log2, step, last, done, MASKED: gl.constexpr
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
    keys.wait_full(tile + 1, step < last)
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
def _place(sizes, kv_head, first_row, first_token, length, stride_row, layout: gl.constexpr):
    """Offsets of 64 rows' elements, tokens times padded heads, and which of the rows exist."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, sizes.D, layout=gl.SliceLayout(0, layout))
    token, member = first_token + row // sizes.PADDED_GROUP, row % sizes.PADDED_GROUP
    head_d = ((kv_head * sizes.GROUP + member) * sizes.D)[:, None] + column[None, :]
    is_row = (token < length) & (member < sizes.GROUP)
    return (first_row + token).to(gl.int64)[:, None] * stride_row + head_d, is_row[:, None]


@gluon.jit
def _load_q(queries, sizes, kv_head, first_row, first_token, length):
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // sizes.D, sizes.D // 8], [4, 1], [1, 0])
    place, is_row = _place(sizes, kv_head, first_row, first_token, length, queries.stride_q, copy)
    return gl.load(queries.q_ptr + place, mask=is_row, other=0.0)


@gluon.jit
def _store_out(queries, sizes, acc, row_sum, kv_head, first_row, first_token, length):
    sums: gl.constexpr = acc.type.layout
    out = acc / gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, sums))[:, None]
    place, is_row = _place(sizes, kv_head, first_row, first_token, length, sizes.H * sizes.D, sums)
    gl.store(queries.out_ptr + place, out.to(queries.out_ptr.dtype.element_ty), mask=is_row)
