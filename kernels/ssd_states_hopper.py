"""The walk over chunks of `kernels.ssd_scan`, by hand for Hopper: 16-bit inputs whose sizes it takes.

The state never leaves the sums of the matrix units but for a rounded copy. While they add a chunk's gain, the threads
scale the next chunk's x, which is a left operand in registers, and store the state from before.

No fence stands between asynchronous copies and the products that read them, as in CUTLASS's kernels of this kind: with
one, a thread waits for all its copies under way, and a step takes as long as memory does (measured: 2.8 us).

Shapes    as _ssd_states_kernel's; a program holds a whole state of one head
Source    NVIDIA, PTX ISA, wgmma
Tests     on a Hopper GPU alone, for Gluon has no interpreter; elsewhere that it compiles
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.chunks import ChunkTable

NUM_WARPS = 4
STAGES = gl.constexpr(4)  # chunks in shared memory: one in use, the others on their way

# Triton 3.6 calls it by the longer name.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _ask_for(
    slot, first_row, num_rows, x_ptr, B_ptr, x_tiles, B_tiles, x_stride, B_stride,
    P: gl.constexpr, N: gl.constexpr, Q: gl.constexpr, x_rows: gl.constexpr, B_rows: gl.constexpr,
):  # fmt: skip
    """x and B of a chunk, on their way to its tiles; zero behind its rows."""
    row = gl.arange(0, Q, gl.SliceLayout(1, x_rows))
    p = gl.arange(0, P, gl.SliceLayout(0, x_rows))
    x_place = x_ptr + first_row.to(gl.int64) * x_stride + ((row * x_stride)[:, None] + p[None, :])
    async_load(x_tiles.index(slot), x_place, mask=(row < num_rows)[:, None])
    row = gl.arange(0, Q, gl.SliceLayout(1, B_rows))
    n = gl.arange(0, N, gl.SliceLayout(0, B_rows))
    B_place = B_ptr + first_row.to(gl.int64) * B_stride + ((row * B_stride)[:, None] + n[None, :])
    async_load(B_tiles.index(slot), B_place, mask=(row < num_rows)[:, None])


@gluon.jit
def _weights(decay, dt, whole, operand: gl.constexpr):
    """What each row's x counts in the state after its chunk: [Q], along the columns of the left operand."""
    return gl.convert_layout(gl.exp2(whole - decay) * dt, gl.SliceLayout(0, operand))


@gluon.jit
def _weighted(x_tile, weight, operand: gl.constexpr):
    x = x_tile.permute((1, 0)).load(operand)
    return (x.to(gl.float32) * weight[None, :]).to(x.dtype)


@gluon.jit(do_not_specialize_on_alignment=["chunks_ptr", "sequences_ptr"])
def _ssd_hopper_states_kernel(
    x_ptr, B_ptr, decay_ptr, chunk_dt_ptr, start_ptr, pool_ptr, chunks_ptr, sequences_ptr,
    x_eighths, B_eighths, slot_stride,
    H: gl.constexpr, P: gl.constexpr, N: gl.constexpr, HEADS_A_GROUP: gl.constexpr, Q: gl.constexpr,
):  # fmt: skip
    """start [C, H, P, N], the state before each chunk, and the states to write."""
    states: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])  # [P, N]
    operand: gl.constexpr = gl.DotOperandLayout(0, states, 2)  # [P, Q]
    x_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // P, P // 8], [4, 1], [1, 0])
    B_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = x_ptr.dtype.element_ty

    x_stride, B_stride = x_eighths * 8, B_eighths * 8  # so the compiler knows that rows begin on 16 bytes
    head, sequence = gl.program_id(0), gl.program_id(1)
    x_ptr += head * P
    B_ptr += head // HEADS_A_GROUP * N
    decay_ptr += head * Q
    chunk_dt_ptr += head * Q
    first_chunk = gl.load(sequences_ptr + sequence * 4)
    end_chunk = gl.load(sequences_ptr + sequence * 4 + 1)
    if first_chunk == end_chunk:
        return
    src = gl.load(sequences_ptr + sequence * 4 + 2).to(gl.int64)
    last = end_chunk - 1

    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, Q, P], shared)
    B_tiles = gl.allocate_shared_memory(dtype, [STAGES, Q, N], shared)
    for i in gl.static_range(STAGES - 1):
        if first_chunk + i < end_chunk:
            first_row = gl.load(chunks_ptr + (first_chunk + i) * 4)
            num_rows = gl.load(chunks_ptr + (first_chunk + i) * 4 + 1)
            _ask_for(
                (first_chunk + i) % STAGES, first_row, num_rows, x_ptr, B_ptr, x_tiles, B_tiles, x_stride, B_stride,
                P, N, Q, x_rows, B_rows,
            )  # fmt: skip
        async_copy.commit_group()

    p = gl.arange(0, P, gl.SliceLayout(1, states))
    n = gl.arange(0, N, gl.SliceLayout(0, states))
    in_pool = pool_ptr + head * (P * N) + (p * N)[:, None] + n[None, :]
    found = (p >= 0)[:, None] & (n < gl.where(src >= 0, N, 0))[None, :]
    state = gl.load(in_pool + src * slot_stride, mask=found, other=0.0).to(gl.float32)
    start_place = (gl.arange(0, P, gl.SliceLayout(1, B_rows)) * N)[:, None]
    start_place += gl.arange(0, N, gl.SliceLayout(0, B_rows))[None, :]

    # What a step begins with is loaded in the one before, and what makes its weights one earlier still.
    q = gl.arange(0, Q, line)
    whole = gl.load(decay_ptr + first_chunk * (H * Q) + Q - 1)
    decay = gl.load(decay_ptr + first_chunk * (H * Q) + q)
    dt = gl.load(chunk_dt_ptr + first_chunk * (H * Q) + q)
    near, far = gl.minimum(first_chunk + 1, last), gl.minimum(first_chunk + STAGES - 1, last)
    next_whole = gl.load(decay_ptr + near * (H * Q) + Q - 1)
    next_decay = gl.load(decay_ptr + near * (H * Q) + q)
    next_dt = gl.load(chunk_dt_ptr + near * (H * Q) + q)
    dst = gl.load(chunks_ptr + first_chunk * 4 + 2)
    first_row = gl.load(chunks_ptr + far * 4)
    num_rows = gl.load(chunks_ptr + far * 4 + 1)
    async_copy.wait_group(STAGES - 2)
    weighted = _weighted(x_tiles.index(first_chunk % STAGES), _weights(decay, dt, whole, operand), operand)
    for chunk in range(first_chunk, end_chunk):
        rounded = state.to(dtype)
        state *= gl.exp2(whole)
        state = warpgroup_mma(weighted, B_tiles.index(chunk % STAGES), state, is_async=True)

        if chunk + STAGES - 1 < end_chunk:  # to where the step before has been reading
            _ask_for(
                (chunk + STAGES - 1) % STAGES, first_row, num_rows, x_ptr, B_ptr, x_tiles, B_tiles, x_stride, B_stride,
                P, N, Q, x_rows, B_rows,
            )  # fmt: skip
        async_copy.commit_group()
        start = start_ptr + (chunk * H + head).to(gl.int64) * (P * N)
        gl.store(start + start_place, gl.convert_layout(rounded, B_rows))
        weight = _weights(next_decay, next_dt, next_whole, operand)
        whole, this_dst = next_whole, dst.to(gl.int64)
        near, behind = gl.minimum(chunk + 1, last), gl.minimum(chunk + 2, last)
        far = gl.minimum(chunk + STAGES, last)
        next_whole = gl.load(decay_ptr + behind * (H * Q) + Q - 1)
        next_decay = gl.load(decay_ptr + behind * (H * Q) + q)
        next_dt = gl.load(chunk_dt_ptr + behind * (H * Q) + q)
        dst = gl.load(chunks_ptr + near * 4 + 2)
        first_row = gl.load(chunks_ptr + far * 4)
        num_rows = gl.load(chunks_ptr + far * 4 + 1)
        async_copy.wait_group(STAGES - 2)
        next_weighted = _weighted(x_tiles.index(near % STAGES), weight, operand)
        state, weighted = warpgroup_mma_wait(0, [state, weighted])
        weighted = next_weighted
        if this_dst >= 0:
            gl.store(in_pool + this_dst * slot_stride, state.to(pool_ptr.dtype.element_ty))
    async_copy.wait_group(0)


def launch_states_hopper(
    x: Tensor, B: Tensor, decay: Tensor, chunk_dt: Tensor, start: Tensor, state_pool: Tensor, table: ChunkTable
) -> None:
    H, P = x.shape[1:]
    G, N = B.shape[1:]
    _ssd_hopper_states_kernel[(H, len(table.sequences_N4))](
        x, B, decay, chunk_dt, start, state_pool, table.chunks_C4, table.sequences_N4, x.stride(0) // 8,
        B.stride(0) // 8, state_pool.stride(0), H=H, P=P, N=N, HEADS_A_GROUP=H // G, Q=decay.shape[2],
        num_warps=NUM_WARPS,
    )  # fmt: skip


def fits_hopper(x: Tensor, B: Tensor, chunk_size: int) -> bool:
    """Whether the chip, the dtype and the sizes are such as the kernel takes."""
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and x.dtype in (torch.bfloat16, torch.float16)
        and (x.shape[2], B.shape[2], chunk_size) == (64, 128, 128)
        and x.stride(0) % 8 == B.stride(0) % 8 == 0
        and x.data_ptr() % 16 == B.data_ptr() % 16 == 0
    )
