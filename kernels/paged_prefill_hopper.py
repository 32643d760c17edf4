"""`kernels.paged_prefill` by hand for Hopper: same shapes, contract and numerics, for 16-bit heads of 64 or 256.

A block of threads is several warp groups, each at its own work. One warp, the producer, asks the copy engine for keys
and values, a block of the pool at a time, as soon as a place in shared memory is free. The others, consumers of 64
query rows each, multiply and weigh: while one's weights are made, another's products run, and its own product of the
tile before. Nobody waits for all: consumers tell the producer by barriers in shared memory what they have read.
Keys are taken from the last to the first: only the first steps mask.

Source    Shah et al. 2024, "FlashAttention-3", section 3
Tests     on a Hopper GPU alone, for Gluon has no interpreter; elsewhere that it compiles
"""

from typing import NamedTuple

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

from kernels.paged_prefill import LOG2_E, PagedChunks, check_paged
from kernels.sizes import next_power_of_2

# Triton 3.6 calls them by longer names.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
wait_for_warps = getattr(gl, "barrier", None) or gl.thread_barrier
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
MULTIPROCESSORS = 132
LEAST_REGISTERS = 32  # of a producer's thread
SPAN = gl.constexpr(64)  # elements of a row that the copy engine lays out together: 128 bytes


class HopperTile(NamedTuple):
    """How a block of threads works: `consumers` times 64 rows against `keys` keys at a time, `stages` tiles ahead."""

    consumers: int
    keys: int
    stages: int
    halves: int = 1  # times 64 rows that a consumer has
    persistent: bool = True  # a program a multiprocessor, which takes item after item


def hopper_tile(head_dim: int) -> HopperTile:
    """The fastest measured on an H200 (docs/gpu-notes.md)."""
    return HopperTile(2, 64, 2) if head_dim == 256 else HopperTile(3, 64, 4)


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
def _locate(item, num_items, first_row_ptr, num_sequences, HKV: gl.constexpr, TOKENS: gl.constexpr):
    """KV head, sequence, its first row and its rows, and the item's first token. Late tokens have most keys: first."""
    kv_head = item % HKV
    place = num_items // HKV - 1 - item // HKV
    # Sequence i's tiles start at first_row[i] // TOKENS + i, which leaves room enough for each one's last tile.
    sequence, behind = 0, num_sequences
    while behind - sequence > 1:
        middle = (sequence + behind) // 2
        is_before = gl.load(first_row_ptr + middle) // TOKENS + middle <= place
        sequence = gl.where(is_before, middle, sequence)
        behind = gl.where(is_before, behind, middle)
    first_row = gl.load(first_row_ptr + sequence)
    length = gl.load(first_row_ptr + sequence + 1) - first_row
    return kv_head, sequence, first_row, length, (place - first_row // TOKENS - sequence) * TOKENS


@gluon.jit
def _turned(round, num_programs):
    """Which item of a round is this program's: every other round runs backwards, so that long items even out."""
    forward = gl.program_id(0)
    return round * num_programs + gl.where(round % 2 == 0, forward, num_programs - 1 - forward)


@gluon.jit
def _ask(
    desc, pieces, full, stage, table_ptr, first_block, num_blocks, block_rows, no_row, column,
    D: gl.constexpr, BLOCKS: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """Asks for a tile's pieces. Where it ENDS the sequence, what lies behind the `num_blocks` held becomes zero."""
    for i in gl.static_range(BLOCKS):
        if ENDS:
            is_held = first_block + i < num_blocks
            row = gl.where(is_held, gl.load(table_ptr + first_block + i, mask=is_held, other=0) * block_rows, no_row)
        else:
            row = gl.load(table_ptr + first_block + i) * block_rows
        for j in gl.static_range(D // SPAN):
            piece = pieces.index((stage * (D // SPAN) + j) * BLOCKS + i)
            tma_load(desc, [row, column + j * SPAN], full, piece)


@gluon.jit
def _produce(feed, shape: gl.constexpr):
    """Asks for the keys and values of every item's tiles, from the last to the first."""
    k_desc, v_desc, pieces_k, pieces_v, full_k, full_v, free_k, free_v = feed[0]
    v_ptr, first_row_ptr, start_ptr, table_ptr, num_items, num_sequences, stride_table, block_rows, no_row = feed[1]
    HKV: gl.constexpr = shape[1]
    D: gl.constexpr = shape[4]
    KEYS: gl.constexpr = shape[5]
    STAGES: gl.constexpr = shape[6]
    BLOCK_SIZE: gl.constexpr = shape[8]
    TOKENS: gl.constexpr = shape[7] // shape[3]
    BLOCKS: gl.constexpr = KEYS // BLOCK_SIZE
    SPANS: gl.constexpr = D // SPAN
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    num_programs = gl.num_programs(0)
    done = 0  # tiles of earlier items
    for round in range((num_items + num_programs - 1) // num_programs):
        item = _turned(round, num_programs)
        if item < num_items:
            kv_head, sequence, _, length, first_token = _locate(
                item, num_items, first_row_ptr, num_sequences, HKV, TOKENS
            )
            if first_token < length:
                end = gl.load(start_ptr + sequence) + gl.minimum(first_token + TOKENS, length)
                last = (end - 1) // KEYS
                table = table_ptr + sequence * stride_table
                column = kv_head * D
                num_blocks = (end + BLOCK_SIZE - 1) // BLOCK_SIZE

                stage = done % STAGES
                phase = (done // STAGES + 1) & 1
                mbarrier.wait(free_k.index(stage), phase)
                mbarrier.expect(full_k.index(stage), KEYS * D * 2)
                _ask(
                    k_desc, pieces_k, full_k.index(stage), stage, table, last * BLOCKS, num_blocks, block_rows,
                    no_row, column, D, BLOCKS, True,
                )  # fmt: skip
                mbarrier.wait(free_v.index(stage), phase)
                whole = end // BLOCK_SIZE  # blocks that the copy engine may take: it knows no end inside of one
                if whole < num_blocks:
                    # What lies behind the sequence's end must become zero, for a weight of zero hides no NaN.
                    token = gl.arange(0, BLOCK_SIZE, layout=gl.SliceLayout(1, copy))
                    element = gl.arange(0, SPAN, layout=gl.SliceLayout(0, copy))
                    row = gl.load(table + whole).to(gl.int64) * block_rows + token
                    place = (row * (HKV * D) + column)[:, None] + element[None, :]
                    is_held = (whole * BLOCK_SIZE + token < end)[:, None]
                    for j in range(SPANS):
                        piece = pieces_v.index((stage * SPANS + j) * BLOCKS + whole - last * BLOCKS)
                        piece.store(gl.load(v_ptr + place + j * SPAN, mask=is_held, other=0.0))
                    fence_async_shared()
                    wait_for_warps()
                mbarrier.expect(full_v.index(stage), KEYS * D * 2, whole == num_blocks)
                mbarrier.expect(full_v.index(stage), (KEYS - BLOCK_SIZE) * D * 2, whole < num_blocks)
                for i in gl.static_range(BLOCKS):
                    place_i = last * BLOCKS + i
                    is_whole = place_i < whole
                    row_i = gl.where(is_whole, gl.load(table + place_i, mask=is_whole, other=0) * block_rows, no_row)
                    for j in gl.static_range(SPANS):
                        piece = pieces_v.index((stage * SPANS + j) * BLOCKS + i)
                        asked = is_whole | (place_i >= num_blocks)
                        tma_load(v_desc, [row_i, column + j * SPAN], full_v.index(stage), piece, pred=asked)

                for step in range(1, last + 1):
                    stage = (done + step) % STAGES
                    phase = ((done + step) // STAGES + 1) & 1
                    mbarrier.wait(free_k.index(stage), phase)
                    mbarrier.expect(full_k.index(stage), KEYS * D * 2)
                    _ask(
                        k_desc, pieces_k, full_k.index(stage), stage, table, (last - step) * BLOCKS, num_blocks,
                        block_rows, no_row, column, D, BLOCKS, False,
                    )  # fmt: skip
                    mbarrier.wait(free_v.index(stage), phase)
                    mbarrier.expect(full_v.index(stage), KEYS * D * 2)
                    _ask(
                        v_desc, pieces_v, full_v.index(stage), stage, table, (last - step) * BLOCKS, num_blocks,
                        block_rows, no_row, column, D, BLOCKS, False,
                    )  # fmt: skip
                done += last + 1


@gluon.jit
def _consume_step(
    acc, weight, row_max, row_sum, q, k_tiles, v_tiles, full_k, full_v, free_k, free_v,
    position, scale_log2, step, last, done,
    KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Weights of tile last - step, whose keys are there, under the product of those of the tile behind it."""
    scores: gl.constexpr = weight.type.layout
    sums: gl.constexpr = acc.type.layout
    count = done + step
    stage = count % STAGES
    before = (count - 1) % STAGES
    rounded = gl.convert_layout(weight.to(v_tiles.dtype), gl.DotOperandLayout(0, sums, 2))
    nothing = gl.zeros([64, KEYS], gl.float32, scores)
    score = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(full_v.index(before), (count - 1) // STAGES & 1)
    acc = warpgroup_mma(rounded, v_tiles.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, [score])
    mbarrier.arrive(free_k.index(stage), count=1)
    first_key = (last - step) * KEYS
    weight, weight_sum, row_max, shrink = _softmax(score, row_max, position, first_key, scale_log2, MASKED)
    row_sum = row_sum * gl.convert_layout(shrink, gl.SliceLayout(1, row_sum.type.layout))[:, None] + weight_sum
    # This wait is a loop, which the assembler moves nothing across: without it the sums would be waited for before
    # the exponentials.
    mbarrier.wait(full_k.index((count + 1) % STAGES), (count + 1) // STAGES & 1, step < last)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free_v.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
    return acc, weight, row_max, row_sum


@gluon.jit
def _consume(work, shape: gl.constexpr, ME: gl.constexpr):
    """Rows 64 * ME and on of every item."""
    num_items, num_sequences, first_row_ptr, start_ptr = work[3]
    HKV: gl.constexpr = shape[1]
    TOKENS: gl.constexpr = shape[7] // shape[3]
    num_programs = gl.num_programs(0)
    done = 0  # tiles of earlier items
    for round in range((num_items + num_programs - 1) // num_programs):
        item = _turned(round, num_programs)
        if item < num_items:
            kv_head, sequence, first_row, length, first_token = _locate(
                item, num_items, first_row_ptr, num_sequences, HKV, TOKENS
            )
            if first_token < length:
                start = gl.load(start_ptr + sequence)
                last = (start + gl.minimum(first_token + TOKENS, length) - 1) // shape[5]
                if shape[9] == 2:
                    _consume_pair(work, kv_head, first_row, first_token, length, start, last, done, shape, ME)
                else:
                    _consume_item(work, kv_head, first_row, first_token, length, start, last, done, shape, ME)
                done += last + 1


@gluon.jit
def _consume_item(
    work, kv_head, first_row, first_token, length, start, last, done, shape: gl.constexpr, ME: gl.constexpr
):
    q_ptr, out_ptr, q_tiles, k_tiles, v_tiles = work[0]
    full_k, full_v, free_k, free_v = work[1]
    stride_q, scale_log2 = work[2]
    H: gl.constexpr = shape[0]
    GROUP: gl.constexpr = shape[2]
    PADDED_GROUP: gl.constexpr = shape[3]
    D: gl.constexpr = shape[4]
    KEYS: gl.constexpr = shape[5]
    STAGES: gl.constexpr = shape[6]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    first_token += ME * 64 // PADDED_GROUP

    row = gl.arange(0, 64, layout=gl.SliceLayout(1, copy))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, copy))
    token, member = first_token + row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < length) & (member < GROUP)
    head_d = ((kv_head * GROUP + member) * D)[:, None] + column[None, :]
    q_place = (first_row + token).to(gl.int64)[:, None] * stride_q + head_d
    q = gl.load(q_ptr + q_place, mask=is_row[:, None], other=0.0)
    if D == 64:
        q_tile = gl.convert_layout(q, gl.DotOperandLayout(0, scores, 2))
    else:
        q_tile = q_tiles.index(ME)
        q_tile.store(q)
        fence_async_shared()

    position = start + first_token + gl.arange(0, 64, layout=gl.SliceLayout(1, scores)) // PADDED_GROUP
    row_max = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, scores))  # finite: a row may see none of a tile
    acc = gl.zeros([64, D], gl.float32, sums)
    stage = done % STAGES
    mbarrier.wait(full_k.index(stage), done // STAGES & 1)
    nothing = gl.zeros([64, KEYS], gl.float32, scores)
    score = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, [score])
    mbarrier.arrive(free_k.index(stage), count=1)
    weight, row_sum, row_max, _ = _softmax(score, row_max, position, last * KEYS, scale_log2, True)
    mbarrier.wait(full_k.index((done + 1) % STAGES), (done + 1) // STAGES & 1, last > 0)
    all_see = gl.minimum((start + first_token + 1) // KEYS, last)  # tiles before this one need no mask
    for step in range(1, last - all_see + 1):
        acc, weight, row_max, row_sum = _consume_step(
            acc, weight, row_max, row_sum, q_tile, k_tiles, v_tiles, full_k, full_v, free_k,
            free_v, position, scale_log2, step, last, done, KEYS, STAGES, True,
        )  # fmt: skip
    for step in range(last - all_see + 1, last + 1):
        acc, weight, row_max, row_sum = _consume_step(
            acc, weight, row_max, row_sum, q_tile, k_tiles, v_tiles, full_k, full_v, free_k,
            free_v, position, scale_log2, step, last, done, KEYS, STAGES, False,
        )  # fmt: skip
    stage = (done + last) % STAGES
    mbarrier.wait(full_v.index(stage), (done + last) // STAGES & 1)
    rounded = gl.convert_layout(weight.to(dtype), gl.DotOperandLayout(0, sums, 2))
    acc = warpgroup_mma(rounded, v_tiles.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free_v.index(stage), count=1)

    row = gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    token, member = first_token + row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < length) & (member < GROUP)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, sums))
    head_d = ((kv_head * GROUP + member) * D)[:, None] + column[None, :]
    out = acc / gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, sums))[:, None]
    out_place = (first_row + token).to(gl.int64)[:, None] * (H * D) + head_d
    gl.store(out_ptr + out_place, out.to(dtype), mask=is_row[:, None])


@gluon.jit
def _load_q(q_ptr, q_tile, kv_head, first_row, first_token, length, stride_q, shape: gl.constexpr):
    GROUP: gl.constexpr = shape[2]
    PADDED_GROUP: gl.constexpr = shape[3]
    D: gl.constexpr = shape[4]
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, copy))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, copy))
    token, member = first_token + row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < length) & (member < GROUP)
    head_d = ((kv_head * GROUP + member) * D)[:, None] + column[None, :]
    q_place = (first_row + token).to(gl.int64)[:, None] * stride_q + head_d
    q_tile.store(gl.load(q_ptr + q_place, mask=is_row[:, None], other=0.0))


@gluon.jit
def _store_out(out_ptr, acc, row_sum, kv_head, first_row, first_token, length, shape: gl.constexpr):
    H: gl.constexpr = shape[0]
    GROUP: gl.constexpr = shape[2]
    PADDED_GROUP: gl.constexpr = shape[3]
    D: gl.constexpr = shape[4]
    sums: gl.constexpr = acc.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    token, member = first_token + row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < length) & (member < GROUP)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, sums))
    head_d = ((kv_head * GROUP + member) * D)[:, None] + column[None, :]
    out = acc / gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, sums))[:, None]
    out_place = (first_row + token).to(gl.int64)[:, None] * (H * D) + head_d
    gl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None])


@gluon.jit
def _pair_step(
    a, b, q_a, q_b, k_tiles, v_tiles, full_k, full_v, free_k, free_v, position, scale_log2, step, last, done,
    KEYS: gl.constexpr, STAGES: gl.constexpr, HALF_TOKENS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """As `_consume_step`, for two tiles of rows: one's weights are made while the other's scores come."""
    acc_a, weight_a, shrink_a, max_a, sum_a = a
    acc_b, weight_b, shrink_b, max_b, sum_b = b
    scores: gl.constexpr = weight_a.type.layout
    sums: gl.constexpr = acc_a.type.layout
    count = done + step
    stage = count % STAGES
    before = (count - 1) % STAGES
    k = k_tiles.index(stage).permute((1, 0))
    v = v_tiles.index(before)
    nothing = gl.zeros([64, KEYS], gl.float32, scores)
    rounded_a = gl.convert_layout(weight_a.to(v_tiles.dtype), gl.DotOperandLayout(0, sums, 2))
    score_a = warpgroup_mma(q_a, k, nothing, use_acc=False, is_async=True)
    rounded_b = gl.convert_layout(weight_b.to(v_tiles.dtype), gl.DotOperandLayout(0, sums, 2))
    score_b = warpgroup_mma(q_b, k, nothing, use_acc=False, is_async=True)
    mbarrier.wait(full_v.index(before), (count - 1) // STAGES & 1)
    acc_a = acc_a * gl.convert_layout(shrink_a, gl.SliceLayout(1, sums))[:, None]
    acc_a = warpgroup_mma(rounded_a, v, acc_a, is_async=True)
    acc_b = acc_b * gl.convert_layout(shrink_b, gl.SliceLayout(1, sums))[:, None]
    acc_b = warpgroup_mma(rounded_b, v, acc_b, is_async=True)
    score_a = warpgroup_mma_wait(3, [score_a])
    first_key = (last - step) * KEYS
    weight_a, more_a, max_a, shrink_a = _softmax(score_a, max_a, position, first_key, scale_log2, MASKED)
    sum_a = sum_a * gl.convert_layout(shrink_a, gl.SliceLayout(1, sum_a.type.layout))[:, None] + more_a
    mbarrier.wait(full_v.index(before), (count - 1) // STAGES & 1)  # as below: keeps what waits behind it
    score_b = warpgroup_mma_wait(2, [score_b])
    mbarrier.arrive(free_k.index(stage), count=1)
    weight_b, more_b, max_b, shrink_b = _softmax(score_b, max_b, position + HALF_TOKENS, first_key, scale_log2, MASKED)
    sum_b = sum_b * gl.convert_layout(shrink_b, gl.SliceLayout(1, sum_b.type.layout))[:, None] + more_b
    mbarrier.wait(full_k.index((count + 1) % STAGES), (count + 1) // STAGES & 1, step < last)
    acc_a, acc_b = warpgroup_mma_wait(0, [acc_a, acc_b])
    mbarrier.arrive(free_v.index(before), count=1)
    return (acc_a, weight_a, shrink_a, max_a, sum_a), (acc_b, weight_b, shrink_b, max_b, sum_b)


@gluon.jit
def _consume_pair(
    work, kv_head, first_row, first_token, length, start, last, done, shape: gl.constexpr, ME: gl.constexpr
):
    q_ptr, out_ptr, q_tiles, k_tiles, v_tiles = work[0]
    full_k, full_v, free_k, free_v = work[1]
    stride_q, scale_log2 = work[2]
    PADDED_GROUP: gl.constexpr = shape[3]
    D: gl.constexpr = shape[4]
    KEYS: gl.constexpr = shape[5]
    STAGES: gl.constexpr = shape[6]
    HALF_TOKENS: gl.constexpr = 64 // PADDED_GROUP
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    first_token += ME * 2 * HALF_TOKENS
    q_a = q_tiles.index(2 * ME)
    q_b = q_tiles.index(2 * ME + 1)
    _load_q(q_ptr, q_a, kv_head, first_row, first_token, length, stride_q, shape)
    _load_q(q_ptr, q_b, kv_head, first_row, first_token + HALF_TOKENS, length, stride_q, shape)
    fence_async_shared()

    position = start + first_token + gl.arange(0, 64, layout=gl.SliceLayout(1, scores)) // PADDED_GROUP
    lowest = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, scores))  # finite: a row may see none of a tile
    nothing = gl.zeros([64, KEYS], gl.float32, scores)
    stage = done % STAGES
    mbarrier.wait(full_k.index(stage), done // STAGES & 1)
    k = k_tiles.index(stage).permute((1, 0))
    score_a = warpgroup_mma(q_a, k, nothing, use_acc=False, is_async=True)
    score_b = warpgroup_mma(q_b, k, nothing, use_acc=False, is_async=True)
    score_a, score_b = warpgroup_mma_wait(0, [score_a, score_b])
    mbarrier.arrive(free_k.index(stage), count=1)
    first_key = last * KEYS
    weight_a, sum_a, max_a, shrink_a = _softmax(score_a, lowest, position, first_key, scale_log2, True)
    weight_b, sum_b, max_b, shrink_b = _softmax(score_b, lowest, position + HALF_TOKENS, first_key, scale_log2, True)
    a = (gl.zeros([64, D], gl.float32, sums), weight_a, shrink_a, max_a, sum_a)
    b = (gl.zeros([64, D], gl.float32, sums), weight_b, shrink_b, max_b, sum_b)
    mbarrier.wait(full_k.index((done + 1) % STAGES), (done + 1) // STAGES & 1, last > 0)
    all_see = gl.minimum((start + first_token + 1) // KEYS, last)  # tiles before this one need no mask
    for step in range(1, last - all_see + 1):
        a, b = _pair_step(
            a, b, q_a, q_b, k_tiles, v_tiles, full_k, full_v, free_k, free_v, position, scale_log2, step, last, done,
            KEYS, STAGES, HALF_TOKENS, True,
        )  # fmt: skip
    for step in range(last - all_see + 1, last + 1):
        a, b = _pair_step(
            a, b, q_a, q_b, k_tiles, v_tiles, full_k, full_v, free_k, free_v, position, scale_log2, step, last, done,
            KEYS, STAGES, HALF_TOKENS, False,
        )  # fmt: skip
    acc_a, weight_a, shrink_a, max_a, sum_a = a
    acc_b, weight_b, shrink_b, max_b, sum_b = b
    stage = (done + last) % STAGES
    mbarrier.wait(full_v.index(stage), (done + last) // STAGES & 1)
    rounded_a = gl.convert_layout(weight_a.to(dtype), gl.DotOperandLayout(0, sums, 2))
    rounded_b = gl.convert_layout(weight_b.to(dtype), gl.DotOperandLayout(0, sums, 2))
    acc_a = acc_a * gl.convert_layout(shrink_a, gl.SliceLayout(1, sums))[:, None]
    acc_b = acc_b * gl.convert_layout(shrink_b, gl.SliceLayout(1, sums))[:, None]
    acc_a = warpgroup_mma(rounded_a, v_tiles.index(stage), acc_a, is_async=True)
    acc_b = warpgroup_mma(rounded_b, v_tiles.index(stage), acc_b, is_async=True)
    acc_a, acc_b = warpgroup_mma_wait(0, [acc_a, acc_b])
    mbarrier.arrive(free_v.index(stage), count=1)
    _store_out(out_ptr, acc_a, sum_a, kv_head, first_row, first_token, length, shape)
    _store_out(out_ptr, acc_b, sum_b, kv_head, first_row, first_token + HALF_TOKENS, length, shape)


@gluon.jit(do_not_specialize=["num_items", "num_sequences", "stride_table", "block_rows", "no_row"])
def _hopper_prefill_kernel(
    q_ptr, k_desc, v_desc, v_ptr, out_ptr, first_row_ptr, start_ptr, table_ptr,
    num_items, num_sequences, stride_q, block_rows, no_row, stride_table, scale_log2,
    H: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    HALVES: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Items are one KV head's tokens in 64 * CONSUMERS rows of one sequence, as in `kernels.paged_prefill`."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    # Each tile of keys or values is made of pieces: a block's tokens, SPAN elements of each. Spans are outermost.
    PIECES: gl.constexpr = STAGES * KEYS * D // (BLOCK_SIZE * SPAN)
    pieces_k = gl.allocate_shared_memory(dtype, [PIECES, BLOCK_SIZE, SPAN], shared)
    pieces_v = gl.allocate_shared_memory(dtype, [PIECES, BLOCK_SIZE, SPAN], shared)
    if HAS_REINTERPRET:
        k_tiles = pieces_k.reinterpret(dtype, [STAGES, KEYS, D], shared)
        v_tiles = pieces_v.reinterpret(dtype, [STAGES, KEYS, D], shared)
    else:
        k_tiles = pieces_k._reinterpret(dtype, [STAGES, KEYS, D], shared)
        v_tiles = pieces_v._reinterpret(dtype, [STAGES, KEYS, D], shared)
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS * HALVES, 64, D], shared)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_k.index(i), count=1)
        mbarrier.init(full_v.index(i), count=1)
        mbarrier.init(free_k.index(i), count=CONSUMERS)
        mbarrier.init(free_v.index(i), count=CONSUMERS)
    fence_async_shared()

    shape: gl.constexpr = (
        H, HKV, GROUP, PADDED_GROUP, D, KEYS, STAGES, 64 * HALVES * CONSUMERS, BLOCK_SIZE, HALVES,
    )  # fmt: skip
    work = (
        (q_ptr, out_ptr, q_tiles, k_tiles, v_tiles),
        (full_k, full_v, free_k, free_v),
        (stride_q, scale_log2),
        (num_items, num_sequences, first_row_ptr, start_ptr),
    )
    feed = (
        (k_desc, v_desc, pieces_k, pieces_v, full_k, full_v, free_k, free_v),
        (v_ptr, first_row_ptr, start_ptr, table_ptr, num_items, num_sequences, stride_table, block_rows, no_row),
    )
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (work, shape, 0)), (_consume, (work, shape, 1)), (_produce, (feed, shape))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consume, (work, shape, 0)), (_consume, (work, shape, 1)), (_consume, (work, shape, 2)),
             (_produce, (feed, shape))],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def paged_prefill_hopper(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, chunks: PagedChunks, tile: HopperTile | None = None
) -> Tensor:
    T, H, D = q.shape
    num_sequences, (block_size, num_kv) = len(chunks.start_N), k_pool.shape[1:3]
    check_paged(q, k_pool, v_pool)
    if not fits_hopper(q, k_pool):
        raise ValueError(f"q {tuple(q.shape)} {q.dtype}, pool {tuple(k_pool.shape)}: use paged_prefill_triton")
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    tile = tile or hopper_tile(D)
    consumer_registers, producer_registers = registers(tile)
    padded_group = next_power_of_2(H // num_kv)
    num_items = (T // (64 * tile.consumers * tile.halves // padded_group) + num_sequences) * num_kv
    block_rows = k_pool.stride(0) // k_pool.stride(1)
    keys, values = _rows_of(k_pool), _rows_of(v_pool)
    grid = (min(num_items, MULTIPROCESSORS) if tile.persistent else num_items,)
    _hopper_prefill_kernel[grid](
        q, keys, values, v_pool, out, chunks.first_row_N1, chunks.start_N, chunks.table_NM,
        num_items, num_sequences, q.stride(0), block_rows, keys.shape[0], chunks.table_NM.stride(0), scale * LOG2_E,
        H=H, HKV=num_kv, GROUP=H // num_kv, PADDED_GROUP=padded_group, D=D, BLOCK_SIZE=block_size,
        KEYS=tile.keys, STAGES=tile.stages, CONSUMERS=tile.consumers, HALVES=tile.halves,
        REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        num_warps=4, maxnreg=launch_registers(tile),
    )  # fmt: skip
    return out


def launch_registers(tile: HopperTile) -> int:
    """Of each thread when the block starts: the multiprocessor's, evenly; the producer's warp group counts in full."""
    return 65536 // (128 * (tile.consumers + 1)) // 8 * 8


def registers(tile: HopperTile) -> tuple[int, int]:
    """Of a consumer's thread, and of the producer's: what is left."""
    total = launch_registers(tile) * (tile.consumers + 1)
    each = min((total - LEAST_REGISTERS) // tile.consumers // 8 * 8, 240)
    return each, total - tile.consumers * each


def _rows_of(pool: Tensor) -> TensorDescriptor:
    """A pool [P, bs, Hkv, D] as rows of one token's heads, for copies of one block and SPAN elements."""
    num_blocks, block_size, num_kv, D = pool.shape
    width = num_kv * D
    rows = (num_blocks - 1) * (pool.stride(0) // width) + block_size
    return TensorDescriptor(pool, [rows, width], [width, 1], [block_size, SPAN.value], LAYOUT)


LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


def fits_hopper(q: Tensor, k_pool: Tensor) -> bool:
    """Whether the chip, the dtype, the heads and the blocks are such as the kernel takes."""
    H, D = q.shape[1:]
    _, block_size, num_kv, _ = k_pool.shape
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.bfloat16, torch.float16)
        and D in (64, 256)
        and H // num_kv <= 64
        and 64 % block_size == 0
        and block_size >= 8  # the copy engine's swizzle repeats every 8 rows
        and k_pool.stride(1) == num_kv * D
        and k_pool.stride(0) % k_pool.stride(1) == 0
    )
