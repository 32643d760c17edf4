"""`kernels.paged_prefill` by hand for Hopper: same shapes, contract and numerics, for 16-bit heads of 256.

Triton waits for every product of scores where it stands. Here a step asks for its scores, rescales the sums and
rounds the weights of the step before while they come, asks for the values' product with those, and makes its own
weights meanwhile: the matrix units hardly wait. Keys and values come by asynchronous copies of 16 bytes, asked for a
whole step before their use. Keys are taken from the last to the first: only the first steps mask.

Source    Shah et al. 2024, "FlashAttention-3", section 3.2 (overlap within a warp group)
Tests     on a Hopper GPU alone, for Gluon has no interpreter; elsewhere that it compiles
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.paged_prefill import LOG2_E, PagedChunks, check_paged
from kernels.sizes import next_power_of_2

KEYS, NUM_WARPS = 64, 8
ROWS = 16 * NUM_WARPS
SLOTS = gl.constexpr(2)  # tiles of keys, and of values, in shared memory: one in use, one on its way

# Triton 3.6 calls it by the longer name.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _wide(x):
    """An int32 of at least zero, such that the product of two is one instruction: signed ones take four."""
    return x.to(gl.uint32).to(gl.uint64)


@gluon.jit
def _blocks_of(table_ptr, tile, KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr, copy: gl.constexpr):
    """The block of each key of a tile, all of which the sequence has; of the first for a tile before it."""
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, copy))
    return gl.load(table_ptr + gl.maximum(tile, 0) * (KEYS // BLOCK_SIZE) + key // BLOCK_SIZE)


@gluon.jit
def _softmax(score, row_max, row_sum, position, first_key, scale_log2, MASKED: gl.constexpr):
    """Weights of a tile's keys; maximum and sum with them; by how much what there was before shrinks."""
    if MASKED:
        columns: gl.constexpr = gl.SliceLayout(0, score.type.layout)
        key = first_key + gl.arange(0, score.shape[1], layout=columns)
        score = gl.where(key[None, :] <= position[:, None], score, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(score, 1) * scale_log2)
    weight = gl.exp2(score * scale_log2 - new_max[:, None])
    shrink = gl.exp2(row_max - new_max)
    return weight, new_max, row_sum * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _step(
    acc, weight, shrink, row_max, row_sum, block, next_block, q_tile, k_tiles, v_tiles, k_ptr, v_ptr, table_ptr,
    in_block, stride_block, position, scale_log2, step, last,
    ROWS: gl.constexpr, KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    copy: gl.constexpr, scores: gl.constexpr, sums: gl.constexpr, weights: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Weights of tile last - 1 - step, beside the values of the tile behind it, whose product is not waited for.

    `block` places this tile, `next_block` the one before it, whose keys are asked for here with this tile's values.
    """
    tile = last - 1 - step
    rounded = gl.convert_layout(weight.to(q_tile.dtype), weights)
    async_copy.wait_group(0)
    fence_async_shared()
    nothing = gl.zeros([ROWS, KEYS], gl.float32, scores)
    score = warpgroup_mma(
        q_tile, k_tiles.index((step + 1) % SLOTS).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    async_load(k_tiles.index(step % SLOTS), (k_ptr + _wide(next_block) * _wide(stride_block))[:, None] + in_block)
    async_load(v_tiles.index((step + 1) % SLOTS), (v_ptr + _wide(block) * _wide(stride_block))[:, None] + in_block)
    async_copy.commit_group()
    block = next_block
    next_block = _blocks_of(table_ptr, tile - 2, KEYS, BLOCK_SIZE, copy)

    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
    acc = warpgroup_mma(rounded, v_tiles.index(step % SLOTS), acc, is_async=True)
    score = warpgroup_mma_wait(1, [score])
    weight, row_max, row_sum, shrink = _softmax(score, row_max, row_sum, position, tile * KEYS, scale_log2, MASKED)
    acc = warpgroup_mma_wait(0, [acc])
    return acc, weight, shrink, row_max, row_sum, block, next_block


@gluon.jit(  # one kernel, as in `kernels.paged_prefill`
    do_not_specialize=["num_sequences", "stride_table"],
    do_not_specialize_on_alignment=["first_row_ptr", "start_ptr", "table_ptr"],
)
def _hopper_prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, first_row_ptr, start_ptr, table_ptr,
    num_sequences, stride_q, stride_block, stride_table, scale_log2,
    H: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STRIDE_TOKEN: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """One KV head's tokens in ROWS rows of one sequence, as in `kernels.paged_prefill`."""
    TOKENS: gl.constexpr = ROWS // PADDED_GROUP
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [1, D // 8], [8, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    kv_head = gl.program_id(0) % HKV
    place = gl.num_programs(0) // HKV - 1 - gl.program_id(0) // HKV
    sequence, behind = 0, num_sequences
    while behind - sequence > 1:
        middle = (sequence + behind) // 2
        is_before = gl.load(first_row_ptr + middle) // TOKENS + middle <= place
        sequence = gl.where(is_before, middle, sequence)
        behind = gl.where(is_before, behind, middle)
    first_row = gl.load(first_row_ptr + sequence)
    length = gl.load(first_row_ptr + sequence + 1) - first_row
    first_token = (place - first_row // TOKENS - sequence) * TOKENS
    if first_token >= length:
        return
    start = gl.load(start_ptr + sequence)
    end = start + gl.minimum(first_token + TOKENS, length)
    last = (end - 1) // KEYS
    all_see = gl.minimum((start + first_token + 1) // KEYS, last)  # tiles before this one need no mask
    k_ptr += kv_head * D
    v_ptr += kv_head * D
    table_ptr += sequence * stride_table

    k_tiles = gl.allocate_shared_memory(dtype, [SLOTS, KEYS, D], shared)
    v_tiles = gl.allocate_shared_memory(dtype, [SLOTS, KEYS, D], shared)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, copy))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, copy))
    in_block = ((key % BLOCK_SIZE) * STRIDE_TOKEN)[:, None] + column[None, :]
    is_held = last * KEYS + key < end  # the rest becomes zero: a weight of zero does not hide a NaN
    last_block = gl.load(table_ptr + (last * KEYS + key) // BLOCK_SIZE, mask=is_held, other=0)
    block = last_block
    if last > 0:
        block = _blocks_of(table_ptr, last - 1, KEYS, BLOCK_SIZE, copy)
    next_block = block
    if last > 1:
        next_block = _blocks_of(table_ptr, last - 2, KEYS, BLOCK_SIZE, copy)
    last_place = _wide(last_block) * _wide(stride_block)
    async_load(k_tiles.index(0), (k_ptr + last_place)[:, None] + in_block, mask=is_held[:, None])
    async_copy.commit_group()
    async_load(v_tiles.index(0), (v_ptr + last_place)[:, None] + in_block, mask=is_held[:, None])
    async_load(k_tiles.index(1), (k_ptr + _wide(block) * _wide(stride_block))[:, None] + in_block)
    async_copy.commit_group()

    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy))
    token, member = first_token + row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < length) & (member < GROUP)
    head_d = ((kv_head * GROUP + member) * D)[:, None] + column[None, :]
    q_place = (first_row + token).to(gl.int64)[:, None] * stride_q + head_d
    q = gl.load(q_ptr + q_place, mask=is_row[:, None], other=0.0)
    q_tile = gl.allocate_shared_memory(dtype, [ROWS, D], shared, q)
    fence_async_shared()

    position = start + first_token + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores)) // PADDED_GROUP
    row_max = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, scores))  # finite: a row may see none of a tile
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, scores))
    acc = gl.zeros([ROWS, D], gl.float32, sums)
    async_copy.wait_group(1)
    fence_async_shared()
    score = warpgroup_mma(
        q_tile, k_tiles.index(0).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, scores), use_acc=False
    )
    weight, row_max, row_sum, shrink = _softmax(score, row_max, row_sum, position, last * KEYS, scale_log2, True)
    for step in range(0, last - all_see):
        acc, weight, shrink, row_max, row_sum, block, next_block = _step(
            acc, weight, shrink, row_max, row_sum, block, next_block, q_tile, k_tiles, v_tiles, k_ptr, v_ptr, table_ptr,
            in_block, stride_block, position, scale_log2, step, last,
            ROWS, KEYS, BLOCK_SIZE, copy, scores, sums, weights, True,
        )  # fmt: skip
    for step in range(last - all_see, last):
        acc, weight, shrink, row_max, row_sum, block, next_block = _step(
            acc, weight, shrink, row_max, row_sum, block, next_block, q_tile, k_tiles, v_tiles, k_ptr, v_ptr, table_ptr,
            in_block, stride_block, position, scale_log2, step, last,
            ROWS, KEYS, BLOCK_SIZE, copy, scores, sums, weights, False,
        )  # fmt: skip
    async_copy.wait_group(0)
    fence_async_shared()
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
    acc = warpgroup_mma(gl.convert_layout(weight.to(dtype), weights), v_tiles.index(last % SLOTS), acc)

    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums))
    token, member = first_token + row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < length) & (member < GROUP)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, sums))
    head_d = ((kv_head * GROUP + member) * D)[:, None] + column[None, :]
    out = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, sums))[:, None]
    out_place = (first_row + token).to(gl.int64)[:, None] * (H * D) + head_d
    gl.store(out_ptr + out_place, out.to(dtype), mask=is_row[:, None])


def paged_prefill_hopper(q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, chunks: PagedChunks) -> Tensor:
    T, H, D = q.shape
    num_sequences, num_kv = len(chunks.start_N), k_pool.shape[2]
    check_paged(q, k_pool, v_pool)
    if not fits_hopper(q, k_pool):
        raise ValueError(f"q {tuple(q.shape)} {q.dtype}, pool {tuple(k_pool.shape)}: use paged_prefill_triton")
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    padded_group = next_power_of_2(H // num_kv)
    grid = ((T // (ROWS // padded_group) + num_sequences) * num_kv,)
    _hopper_prefill_kernel[grid](
        q, k_pool, v_pool, out, chunks.first_row_N1, chunks.start_N, chunks.table_NM,
        num_sequences, q.stride(0), k_pool.stride(0), chunks.table_NM.stride(0), scale * LOG2_E,
        H=H, HKV=num_kv, GROUP=H // num_kv, PADDED_GROUP=padded_group, D=D, BLOCK_SIZE=k_pool.shape[1],
        STRIDE_TOKEN=k_pool.stride(1), ROWS=ROWS, KEYS=KEYS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def fits_hopper(q: Tensor, k_pool: Tensor) -> bool:
    """Whether the chip, the dtype, the heads and the blocks are such as the kernel takes."""
    H, D = q.shape[1:]
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.bfloat16, torch.float16)
        and D == 256  # of narrower ones `paged_prefill_triton` is faster (docs/gpu-notes.md)
        and H // k_pool.shape[2] <= ROWS
        and KEYS % k_pool.shape[1] == 0
        and k_pool.stride(0) % 16 == 0
    )
