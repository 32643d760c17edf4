"""`kernels.paged_prefill_consumers` for two tiles of rows each: one's weights are made under the other's scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernels.paged_prefill_consumers import _ask_scores, _load_q, _softmax, _store_out


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
