"""`kernels.paged_prefill` by hand for Hopper: same shapes, contract and numerics, for 16-bit heads of 64, 128 or 256.

A block of threads is several warp groups, each at its own work. One warp, the producer, asks the copy engine for keys
and values, a block of the pool at a time, as soon as a place in shared memory is free. The others, consumers of 64
query rows each, multiply and weigh: while one's weights are made, another's products run, and its own product of the
tile before. Nobody waits for all: consumers tell the producer by barriers in shared memory what they have read.
Keys are taken from the last to the first: only the first steps mask.

Source    Shah et al. 2024, "FlashAttention-3", section 3; of exponentials by polynomial, Zadouri et al. 2026,
          "FlashAttention-4"
Tests     on a Hopper GPU alone, for Gluon has no interpreter; elsewhere that it compiles
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
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
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
SPAN = gl.constexpr(64)  # elements of a row that the copy engine lays out together: 128 bytes


class WarpsTile(NamedTuple):
    """How a block of threads works: `consumers` times 64 rows against `keys` keys at a time, `stages` tiles ahead."""

    consumers: int
    keys: int
    stages: int
    turns: bool = False  # consumers ask for products in turn
    poly: int = 0  # of so many exponentials one is a polynomial; 0: none


def warps_tile(head_dim: int) -> WarpsTile:
    return WarpsTile(2, 64, 2) if head_dim == 256 else WarpsTile(3 if head_dim == 64 else 2, 128, 2)


def _exp2_code(pack: int) -> str:
    """PTX for `pack` exponentials: the first is 2^round(x) times a cubic (7.5e-5 off at most), the rest the unit's."""
    cubic = f"""{{
        .reg .f32 x, whole, p;
        .reg .b32 e, bits;
        max.f32 x, ${pack}, 0fC2FC0000;
        add.rn.f32 whole, x, 0f4B400000;
        mov.b32 e, whole;
        sub.rn.f32 whole, whole, 0f4B400000;
        sub.rn.f32 x, x, whole;
        fma.rn.f32 p, x, 0f3D61FBAF, 0f3E786F0E;
        fma.rn.f32 p, p, x, 0f3F31798D;
        fma.rn.f32 p, p, x, 0f3F7FFB49;
        mov.b32 bits, p;
        shl.b32 e, e, 23;
        add.s32 bits, bits, e;
        mov.b32 $0, bits;
    }}"""
    return cubic + "".join(f"\nex2.approx.ftz.f32 ${i}, ${pack + i};" for i in range(1, pack))


EXP2_OF_4, EXP2_OF_8 = gl.constexpr(_exp2_code(4)), gl.constexpr(_exp2_code(8))
FOUR, EIGHT = gl.constexpr("=r,=r,=r,=r,r,r,r,r"), gl.constexpr(",".join(["=r"] * 8 + ["r"] * 8))


@gluon.jit
def _exp2(x, POLY: gl.constexpr):
    """One of POLY goes beside the unit that makes exponentials: it is as busy as the matrix units for heads of 64."""
    if POLY == 4:
        return gl.inline_asm_elementwise(EXP2_OF_4, FOUR, [x], gl.float32, True, 4)
    elif POLY == 8:
        return gl.inline_asm_elementwise(EXP2_OF_8, EIGHT, [x], gl.float32, True, 8)
    else:
        return gl.exp2(x)


@gluon.jit
def _softmax(score, row_max, row_sum, position, first_key, scale_log2, MASKED: gl.constexpr, POLY: gl.constexpr):
    """Weights of a tile's keys; maximum and sum with them; by how much what there was before shrinks."""
    if MASKED:
        columns: gl.constexpr = gl.SliceLayout(0, score.type.layout)
        key = first_key + gl.arange(0, score.shape[1], layout=columns)
        score = gl.where(key[None, :] <= position[:, None], score, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(score, 1) * scale_log2)
    weight = _exp2(score * scale_log2 - new_max[:, None], POLY)
    shrink = gl.exp2(row_max - new_max)
    return weight, new_max, row_sum * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _produce(feed, D: gl.constexpr, KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr):
    """Asks for keys and values of tiles `last` to 0. The last tile's values lie there already."""
    k_desc, v_desc, pieces_k, pieces_v, full_k, full_v, free_k, free_v = feed[0]
    table_ptr, kv_head, last, end, block_rows = feed[1]
    BLOCKS: gl.constexpr = KEYS // BLOCK_SIZE
    SPANS: gl.constexpr = D // SPAN
    column = kv_head * D
    for step in range(last + 1):
        tile = last - step
        stage = step % STAGES
        phase = (step // STAGES + 1) & 1
        mbarrier.wait(free_k.index(stage), phase)
        mbarrier.expect(full_k.index(stage), KEYS * D * 2)
        for i in gl.static_range(BLOCKS):
            # Places behind the sequence's last block name it again: their keys are masked.
            block = gl.load(table_ptr + gl.minimum(tile * BLOCKS + i, (end - 1) // BLOCK_SIZE))
            for j in gl.static_range(SPANS):
                tma_load(
                    k_desc, [block * block_rows, column + j * SPAN], full_k.index(stage),
                    pieces_k.index((stage * SPANS + j) * BLOCKS + i),
                )  # fmt: skip
        mbarrier.wait(free_v.index(stage), phase)
        if step == 0:
            mbarrier.arrive(full_v.index(stage), count=1)
        else:
            mbarrier.expect(full_v.index(stage), KEYS * D * 2)
            for i in gl.static_range(BLOCKS):
                block = gl.load(table_ptr + gl.minimum(tile * BLOCKS + i, (end - 1) // BLOCK_SIZE))
                for j in gl.static_range(SPANS):
                    tma_load(
                        v_desc, [block * block_rows, column + j * SPAN], full_v.index(stage),
                        pieces_v.index((stage * SPANS + j) * BLOCKS + i),
                    )  # fmt: skip


@gluon.jit
def _consume_step(
    acc, weight, row_max, row_sum, q, k_tiles, v_tiles, full_k, full_v, free_k, free_v, turn, next_turn,
    position, scale_log2, step, last,
    KEYS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, POLY: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Weights of tile last - step, whose keys are there, under the product of those of the tile behind it."""
    scores: gl.constexpr = weight.type.layout
    sums: gl.constexpr = acc.type.layout
    stage = step % STAGES
    before = (step - 1) % STAGES
    rounded = gl.convert_layout(weight.to(v_tiles.dtype), gl.DotOperandLayout(0, sums, 2))
    if TURNS:
        mbarrier.wait(turn, (step - 1) & 1)
    nothing = gl.zeros([64, KEYS], gl.float32, scores)
    score = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(full_v.index(before), (step - 1) // STAGES & 1)
    acc = warpgroup_mma(rounded, v_tiles.index(before), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(next_turn, count=1)
    score = warpgroup_mma_wait(1, [score])
    mbarrier.arrive(free_k.index(stage), count=1)
    first_key = (last - step) * KEYS
    weight, row_max, row_sum, shrink = _softmax(score, row_max, row_sum, position, first_key, scale_log2, MASKED, POLY)
    # This wait is a loop, which the assembler moves nothing across: without it the sums would be waited for before
    # the exponentials.
    mbarrier.wait(full_k.index((step + 1) % STAGES), (step + 1) // STAGES & 1, step < last)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free_v.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
    return acc, weight, row_max, row_sum


@gluon.jit
def _consume(work, shape: gl.constexpr, ME: gl.constexpr):
    """Rows 64 * ME and on of the tile."""
    q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, full_k, full_v, free_k, free_v, turns = work[0]
    kv_head, first_row, first_token, length, start, last, stride_q, scale_log2 = work[1]
    H: gl.constexpr = shape[0]
    GROUP: gl.constexpr = shape[1]
    PADDED_GROUP: gl.constexpr = shape[2]
    D: gl.constexpr = shape[3]
    KEYS: gl.constexpr = shape[4]
    STAGES: gl.constexpr = shape[5]
    CONSUMERS: gl.constexpr = shape[6]
    TURNS: gl.constexpr = shape[7]
    POLY: gl.constexpr = shape[8]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    first_token += ME * 64 // PADDED_GROUP
    turn = turns.index(ME)
    next_turn = turns.index((ME + 1) % CONSUMERS)

    row = gl.arange(0, 64, layout=gl.SliceLayout(1, copy))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, copy))
    token, member = first_token + row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < length) & (member < GROUP)
    head_d = ((kv_head * GROUP + member) * D)[:, None] + column[None, :]
    q_place = (first_row + token).to(gl.int64)[:, None] * stride_q + head_d
    q = gl.load(q_ptr + q_place, mask=is_row[:, None], other=0.0)
    if D == 64 and CONSUMERS * KEYS < 3 * 128:
        q_tile = gl.convert_layout(q, gl.DotOperandLayout(0, scores, 2))
    else:
        q_tile = q_tiles.index(ME)
        q_tile.store(q)
        fence_async_shared()

    position = start + first_token + gl.arange(0, 64, layout=gl.SliceLayout(1, scores)) // PADDED_GROUP
    row_max = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, scores))  # finite: a row may see none of a tile
    row_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, scores))
    acc = gl.zeros([64, D], gl.float32, sums)
    mbarrier.wait(full_k.index(0), 0)
    nothing = gl.zeros([64, KEYS], gl.float32, scores)
    score = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, [score])
    mbarrier.arrive(free_k.index(0), count=1)
    if TURNS and ME == CONSUMERS - 1:
        mbarrier.arrive(next_turn, count=1)
    weight, row_max, row_sum, _shrink = _softmax(score, row_max, row_sum, position, last * KEYS, scale_log2, True, 0)
    mbarrier.wait(full_k.index(1 % STAGES), 1 // STAGES & 1, last > 0)
    all_see = gl.minimum((start + first_token + 1) // KEYS, last)  # tiles before this one need no mask
    for step in range(1, last - all_see + 1):
        acc, weight, row_max, row_sum = _consume_step(
            acc, weight, row_max, row_sum, q_tile, k_tiles, v_tiles, full_k, full_v, free_k, free_v, turn, next_turn,
            position, scale_log2, step, last, KEYS, STAGES, TURNS, 0, True,
        )  # fmt: skip
    for step in range(last - all_see + 1, last + 1):
        acc, weight, row_max, row_sum = _consume_step(
            acc, weight, row_max, row_sum, q_tile, k_tiles, v_tiles, full_k, full_v, free_k, free_v, turn, next_turn,
            position, scale_log2, step, last, KEYS, STAGES, TURNS, POLY, False,
        )  # fmt: skip
    mbarrier.wait(full_v.index(last % STAGES), last // STAGES & 1)
    rounded = gl.convert_layout(weight.to(dtype), gl.DotOperandLayout(0, sums, 2))
    acc = warpgroup_mma(rounded, v_tiles.index(last % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])

    row = gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    token, member = first_token + row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < length) & (member < GROUP)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, sums))
    head_d = ((kv_head * GROUP + member) * D)[:, None] + column[None, :]
    out = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, sums))[:, None]
    out_place = (first_row + token).to(gl.int64)[:, None] * (H * D) + head_d
    gl.store(out_ptr + out_place, out.to(dtype), mask=is_row[:, None])


@gluon.jit(do_not_specialize=["num_sequences", "stride_table", "block_rows"])
def _warps_prefill_kernel(
    q_ptr, k_desc, v_desc, v_ptr, out_ptr, first_row_ptr, start_ptr, table_ptr,
    num_sequences, stride_q, block_rows, stride_table, scale_log2,
    H: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    TURNS: gl.constexpr, POLY: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One KV head's tokens in 64 * CONSUMERS rows of one sequence, as in `kernels.paged_prefill`."""
    TOKENS: gl.constexpr = 64 * CONSUMERS // PADDED_GROUP
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
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
    table_ptr += sequence * stride_table

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
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, D], shared)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_k.index(i), count=1)
        mbarrier.init(full_v.index(i), count=1)
        mbarrier.init(free_k.index(i), count=CONSUMERS)
        mbarrier.init(free_v.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=1)

    # The copy engine knows no sequence's end: what lies behind it must become zero, for a weight of zero hides no NaN.
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, copy))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, copy))
    is_held = last * KEYS + key < end
    last_block = gl.load(table_ptr + (last * KEYS + key) // BLOCK_SIZE, mask=is_held, other=0)
    v_row = last_block.to(gl.int64) * block_rows + key % BLOCK_SIZE
    v_place = (v_row * (HKV * D) + kv_head * D)[:, None] + column[None, :]
    async_load(v_tiles.index(0), v_ptr + v_place, mask=is_held[:, None])
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()

    shape: gl.constexpr = (H, GROUP, PADDED_GROUP, D, KEYS, STAGES, CONSUMERS, TURNS, POLY)
    work = (
        (q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, full_k, full_v, free_k, free_v, turns),
        (kv_head, first_row, first_token, length, start, last, stride_q, scale_log2),
    )
    feed = (
        (k_desc, v_desc, pieces_k, pieces_v, full_k, full_v, free_k, free_v),
        (table_ptr, kv_head, last, end, block_rows),
    )
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (work, shape, 0)), (_consume, (work, shape, 1)),
             (_produce, (feed, D, KEYS, BLOCK_SIZE, STAGES))],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consume, (work, shape, 0)), (_consume, (work, shape, 1)), (_consume, (work, shape, 2)),
             (_produce, (feed, D, KEYS, BLOCK_SIZE, STAGES))],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def paged_prefill_warps(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, chunks: PagedChunks, tile: WarpsTile | None = None
) -> Tensor:
    T, H, D = q.shape
    num_sequences, (block_size, num_kv) = len(chunks.start_N), k_pool.shape[1:3]
    check_paged(q, k_pool, v_pool)
    if not fits_warps(q, k_pool):
        raise ValueError(f"q {tuple(q.shape)} {q.dtype}, pool {tuple(k_pool.shape)}: use paged_prefill_triton")
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    tile = tile or warps_tile(D)
    padded_group = next_power_of_2(H // num_kv)
    grid = ((T // (64 * tile.consumers // padded_group) + num_sequences) * num_kv,)
    stride_token = k_pool.stride(1)
    block_rows = k_pool.stride(0) // stride_token
    _warps_prefill_kernel[grid](
        q, _rows_of(k_pool), _rows_of(v_pool), v_pool, out, chunks.first_row_N1, chunks.start_N, chunks.table_NM,
        num_sequences, q.stride(0), block_rows, chunks.table_NM.stride(0), scale * LOG2_E,
        H=H, HKV=num_kv, GROUP=H // num_kv, PADDED_GROUP=padded_group, D=D, BLOCK_SIZE=block_size,
        KEYS=tile.keys, STAGES=tile.stages, CONSUMERS=tile.consumers, TURNS=tile.turns, POLY=tile.poly,
        REGISTERS=registers(tile), num_warps=4,
    )  # fmt: skip
    return out


def registers(tile: WarpsTile) -> int:
    """Of a consumer's thread: what the producer leaves of the multiprocessor's."""
    return 160 if tile.consumers == 3 else 240


def _rows_of(pool: Tensor) -> TensorDescriptor:
    """A pool [P, bs, Hkv, D] as rows of one token's heads, for copies of one block and SPAN elements."""
    num_blocks, block_size, num_kv, D = pool.shape
    width = num_kv * D
    rows = (num_blocks - 1) * (pool.stride(0) // width) + block_size
    return TensorDescriptor(pool, [rows, width], [width, 1], [block_size, SPAN.value], LAYOUT)


LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


def fits_warps(q: Tensor, k_pool: Tensor) -> bool:
    """Whether the chip, the dtype, the heads and the blocks are such as the kernel takes."""
    H, D = q.shape[1:]
    _, block_size, num_kv, _ = k_pool.shape
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.bfloat16, torch.float16)
        and D in (64, 128, 256)
        and H // num_kv <= 64
        and 64 % block_size == 0
        and block_size >= 8  # the copy engine's swizzle repeats every 8 rows
        and k_pool.stride(1) == num_kv * D
        and k_pool.stride(0) % k_pool.stride(1) == 0
    )
