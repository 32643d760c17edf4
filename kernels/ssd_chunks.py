"""The Triton form of `kernels.ssd_prefill` in which only sums walk over time; shapes and contract stand there.

Four kernels: log decays of all chunks; what each chunk alone adds to the state, for all chunks at once; states, a walk
over each sequence's chunks that scales and adds, and turns what a chunk adds into the state before it; outputs, with a
program for BLOCK_M rows of a chunk and a few heads, which share the products of C and B. Sums and outputs begin with
the last chunk: what the kernel before left in the cache is what the next one reads first.

Numerics  as ssd_prefill says; what a chunk adds to the state is rounded to x's dtype, their sum is float32
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chunks import ChunkTable
from kernels.dot import dot, dot_block
from kernels.segments import PrefillSegments
from kernels.sizes import cdiv, next_power_of_2
from kernels.ssd_heads import SsdHeads
from kernels.ssd_scan import _ssd_decay_kernel


@triton.jit
def _first_head(program, HEADS_A_GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Of a program's HEADS heads, HEADS_A_GROUP // HEADS apart: programs that run side by side read heads that lie side
    by side."""
    return program // (HEADS_A_GROUP // HEADS) * HEADS_A_GROUP + program % (HEADS_A_GROUP // HEADS)


@triton.jit
def _ssd_gains_kernel(
    x_ptr,
    B_ptr,
    decay_ptr,
    chunk_dt_ptr,
    gain_ptr,
    chunks_ptr,
    x_stride,  # the strides are those of rows
    B_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """gain [C, H, P, N]: the state after a chunk that begins without one, for HEADS heads of one group."""
    first_head = _first_head(tl.program_id(1), HEADS_A_GROUP, HEADS)
    chunk = tl.num_programs(2) - 1 - tl.program_id(2)
    row, p = tl.arange(0, Q), tl.arange(0, BLOCK_P)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    inside = row < tl.load(chunks_ptr + chunk * 4 + 1)
    B_rows = B_ptr + first_row * B_stride + first_head // HEADS_A_GROUP * N
    B = tl.load(B_rows + row[:, None] * B_stride + n[None, :], mask=inside[:, None] & in_n[None, :], other=0.0)
    x_ptr += first_row * x_stride
    for i in range(HEADS):
        head = first_head + i * (HEADS_A_GROUP // HEADS)
        chunk_rows = (chunk * H + head) * Q
        decay = tl.load(decay_ptr + chunk_rows + row)
        weight = tl.exp2(tl.load(decay_ptr + chunk_rows + Q - 1) - decay) * tl.load(chunk_dt_ptr + chunk_rows + row)
        x_PQ = x_ptr + row[None, :] * x_stride + (head * P + p)[:, None]
        x = tl.load(x_PQ, mask=inside[None, :] & in_p[:, None], other=0.0)
        gain = dot((x.to(tl.float32) * weight[None, :]).to(x_ptr.dtype.element_ty), B)
        out = gain_ptr + tl.cast(chunk * H + head, tl.int64) * (P * N) + p[:, None] * N + n[None, :]
        tl.store(out, gain.to(gain_ptr.dtype.element_ty), mask=in_p[:, None] & in_n[None, :])


@triton.jit
def _ssd_walk_kernel(
    gain_ptr,
    decay_ptr,
    pool_ptr,
    chunks_ptr,
    sequences_ptr,
    slot_stride,
    H: tl.constexpr,
    SIZE: tl.constexpr,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The state before each chunk [C, H, SIZE], in place of the chunk's gain, and the states to write. BLOCK values of
    one head's state a program; loads of AHEAD chunks at once."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_state = place < SIZE
    pool_ptr += head * SIZE
    gain_ptr += head * SIZE
    decay_ptr += head * Q + Q - 1
    first_chunk = tl.load(sequences_ptr + sequence * 4)
    end_chunk = tl.load(sequences_ptr + sequence * 4 + 1)
    src = tl.load(sequences_ptr + sequence * 4 + 2).to(tl.int64)
    found = place < tl.where(src >= 0, SIZE, 0)
    state = tl.load(pool_ptr + src * slot_stride + place, mask=found, other=0.0).to(tl.float32)
    for chunk in range(first_chunk, end_chunk, AHEAD):
        gains = ()  # type: tuple
        decays = ()  # type: tuple
        slots = ()  # type: tuple
        for i in tl.static_range(AHEAD):
            near = tl.minimum(chunk + i, end_chunk - 1)  # beyond the end, the last one again: nothing is made of it
            gains += (tl.load(gain_ptr + tl.cast(near, tl.int64) * (H * SIZE) + place, mask=in_state, other=0.0),)
            decays += (tl.load(decay_ptr + near * (H * Q)),)
            slots += (tl.load(chunks_ptr + near * 4 + 2),)
        for i in tl.static_range(AHEAD):
            if chunk + i < end_chunk:
                start = gain_ptr + tl.cast(chunk + i, tl.int64) * (H * SIZE) + place
                tl.store(start, state.to(gain_ptr.dtype.element_ty), mask=in_state)
                state = state * tl.exp2(decays[i]) + gains[i].to(tl.float32)
                dst = slots[i].to(tl.int64)
                if dst >= 0:
                    tl.store(pool_ptr + dst * slot_stride + place, state.to(pool_ptr.dtype.element_ty), mask=in_state)


@triton.jit
def _ssd_blocks_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    decay_ptr,
    chunk_dt_ptr,
    start_ptr,
    y_ptr,
    chunks_ptr,
    x_stride,
    B_stride,
    C_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y for BLOCK_M rows of a chunk, all or half of it, and HEADS heads of one group.

    Decays between two rows are made one by one only within a block: from the first half's rows to the second half's
    they are products of two factors, up to the first half's end and from there on, neither above 1.
    """
    first_head = _first_head(tl.program_id(1), HEADS_A_GROUP, HEADS)
    chunk, block = tl.num_programs(2) - 1 - tl.program_id(2), tl.program_id(0)
    first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    if block * BLOCK_M >= num_rows:
        return
    row, p, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    m = block * BLOCK_M + row
    in_m, in_p, in_n = m < num_rows, p < P, n < N
    earlier = row < block * BLOCK_M
    group = first_head // HEADS_A_GROUP * N
    C_rows = C_ptr + first_row * C_stride + group
    C = tl.load(C_rows + m[:, None] * C_stride + n[None, :], mask=in_m[:, None] & in_n[None, :], other=0.0)
    B_rows = B_ptr + first_row * B_stride + group
    B = tl.load(B_rows + m[:, None] * B_stride + n[None, :], mask=in_m[:, None] & in_n[None, :], other=0.0)
    score = tl.where(row[:, None] >= row[None, :], dot(C, tl.trans(B)), 0.0)
    HALVES: tl.constexpr = Q > BLOCK_M
    if HALVES:
        B0 = tl.load(B_rows + row[:, None] * B_stride + n[None, :], mask=earlier[:, None] & in_n[None, :], other=0.0)
        score0 = dot(C, tl.trans(B0))

    x_ptr += first_row * x_stride
    y_ptr += first_row * (H * P)
    for i in range(HEADS):
        head = first_head + i * (HEADS_A_GROUP // HEADS)
        chunk_rows = (chunk * H + head) * Q
        decay = tl.load(decay_ptr + chunk_rows + m)
        dt = tl.load(chunk_dt_ptr + chunk_rows + m)
        D = tl.load(D_ptr + head).to(tl.float32)
        in_x = in_m[:, None] & in_p[None, :]
        x = tl.load(x_ptr + m[:, None] * x_stride + (head * P + p)[None, :], mask=in_x, other=0.0)
        start_PN = start_ptr + tl.cast(chunk * H + head, tl.int64) * (P * N) + p[:, None] * N + n[None, :]
        start = tl.load(start_PN, mask=in_p[:, None] & in_n[None, :], other=0.0)
        y = dot(C, tl.trans(start))
        if HALVES:
            decay0 = tl.load(decay_ptr + chunk_rows + row)
            dt0 = tl.load(chunk_dt_ptr + chunk_rows + row)
            half = tl.load(decay_ptr + chunk_rows + BLOCK_M - 1)
            x0_QP = x_ptr + row[:, None] * x_stride + (head * P + p)[None, :]
            x0 = tl.load(x0_QP, mask=earlier[:, None] & in_p[None, :], other=0.0)
            before = tl.where(block > 0, half, 0.0)
            weight0 = score0 * (tl.exp2(half - decay0) * dt0)[None, :]
            y = dot(weight0.to(x_ptr.dtype.element_ty), x0, y * tl.exp2(before))
            y *= tl.exp2(decay - before)[:, None]
        else:
            y *= tl.exp2(decay)[:, None]
        # Above the diagonal the score is 0; the minimum keeps the factor finite there.
        weight = score * (tl.exp2(tl.minimum(decay[:, None] - decay[None, :], 0.0)) * dt[None, :])
        weight += tl.where(row[:, None] == row[None, :], D, 0.0)
        y = dot(weight.to(x_ptr.dtype.element_ty), x, y)
        out = y_ptr + m[:, None] * (H * P) + (head * P + p)[None, :]
        tl.store(out, y.to(y_ptr.dtype.element_ty), mask=in_x)


class ChunkTiles(NamedTuple):
    """How the work is cut."""

    chunk_size: int
    gain_columns: int  # of N, for a program of the gains kernel
    gain_heads: int
    output_rows: int  # of a chunk, all or half, for a program of the output kernel
    output_heads: int
    gain_warps: int = 4
    gain_stages: int = 3
    walk_values: int = 1024
    walk_ahead: int = 8
    output_warps: int = 4
    output_stages: int = 2
    output_registers: int | None = None


def chunk_tiles(dtype: torch.dtype, heads_a_group: int, state_size: int) -> ChunkTiles:
    if dtype == torch.float32:
        # For exactness, not for speed: products of float32 run outside of the matrix units and live in registers.
        return ChunkTiles(32, gain_columns=32, gain_heads=1, output_rows=32, output_heads=1, gain_warps=8,
                          output_warps=8)  # fmt: skip
    chunk_size = 128 if state_size <= 128 else 64  # shared memory holds a chunk's B and C
    shared_heads = heads_a_group & -heads_a_group  # the largest power of two that divides it
    return ChunkTiles(chunk_size, gain_columns=128, gain_heads=min(4, shared_heads), output_rows=64,
                      output_heads=min(8, shared_heads))  # fmt: skip


def ssd_chunks_triton(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    heads: SsdHeads,
    state_pool: Tensor,
    segments: PrefillSegments,
    tiles: ChunkTiles | None = None,
) -> Tensor:
    T, H, P = x.shape
    G, N = B.shape[1:]
    # A row of each input and a slot of the pool lie in one piece; rows and slots may lie apart.
    for name, tensor in (("x", x), ("dt", dt), ("B", B), ("C", C), ("state pool", state_pool)):
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
    y = torch.empty((T, H, P), dtype=x.dtype, device=x.device)
    if T == 0:
        return y
    tiles = tiles or chunk_tiles(x.dtype, H // G, N)
    table = segments.chunk_table(tiles.chunk_size)
    decay, chunk_dt = _launch_decays(dt, heads, table, tiles)
    start = _launch_gains(x, B, decay, chunk_dt, table, tiles)
    _launch_walk(start, decay, state_pool, table, tiles)
    _launch_outputs(x, B, C, heads.D, decay, chunk_dt, start, y, table, tiles)
    return y


def _launch_decays(dt: Tensor, heads: SsdHeads, table: ChunkTable, tiles: ChunkTiles) -> tuple[Tensor, Tensor]:
    H, num_chunks = dt.shape[1], len(table.chunks_C4)
    decay, chunk_dt = dt.new_empty((2, num_chunks, H, tiles.chunk_size), dtype=torch.float32)
    block_h = min(16, next_power_of_2(H))
    _ssd_decay_kernel[(num_chunks, cdiv(H, block_h))](
        dt, heads.A, heads.dt_bias, decay, chunk_dt, table.chunks_C4, dt.stride(0),
        DT_MIN=heads.dt_min, DT_MAX=heads.dt_max, H=H, Q=tiles.chunk_size, BLOCK_H=block_h,
    )  # fmt: skip
    return decay, chunk_dt


def _launch_gains(
    x: Tensor, B: Tensor, decay: Tensor, chunk_dt: Tensor, table: ChunkTable, tiles: ChunkTiles
) -> Tensor:
    H, P = x.shape[1:]
    G, N = B.shape[1:]
    gain = x.new_empty((len(table.chunks_C4), H, P, N))
    block_n = min(tiles.gain_columns, dot_block(N))
    _ssd_gains_kernel[(cdiv(N, block_n), H // tiles.gain_heads, len(table.chunks_C4))](
        x, B, decay, chunk_dt, gain, table.chunks_C4, x.stride(0), B.stride(0),
        H=H, P=P, N=N, HEADS_A_GROUP=H // G, HEADS=tiles.gain_heads, Q=tiles.chunk_size,
        BLOCK_P=dot_block(P), BLOCK_N=block_n, num_warps=tiles.gain_warps, num_stages=tiles.gain_stages,
    )  # fmt: skip
    return gain


def _launch_walk(gain: Tensor, decay: Tensor, state_pool: Tensor, table: ChunkTable, tiles: ChunkTiles) -> None:
    H, size = gain.shape[1], gain[0, 0].numel()
    block = min(tiles.walk_values, next_power_of_2(size))
    _ssd_walk_kernel[(cdiv(size, block), H, len(table.sequences_N4))](
        gain, decay, state_pool, table.chunks_C4, table.sequences_N4, state_pool.stride(0),
        H=H, SIZE=size, Q=tiles.chunk_size, BLOCK=block, AHEAD=tiles.walk_ahead, num_warps=max(1, block // 256),
    )  # fmt: skip


def _launch_outputs(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    decay: Tensor,
    chunk_dt: Tensor,
    start: Tensor,
    y: Tensor,
    table: ChunkTable,
    tiles: ChunkTiles,
) -> None:
    H, P = x.shape[1:]
    G, N = B.shape[1:]
    grid = (tiles.chunk_size // tiles.output_rows, H // tiles.output_heads, len(table.chunks_C4))
    _ssd_blocks_kernel[grid](
        x, B, C, D, decay, chunk_dt, start, y, table.chunks_C4, x.stride(0), B.stride(0), C.stride(0),
        H=H, P=P, N=N, HEADS_A_GROUP=H // G, HEADS=tiles.output_heads, Q=tiles.chunk_size,
        BLOCK_M=tiles.output_rows, BLOCK_P=dot_block(P), BLOCK_N=dot_block(N),
        num_warps=tiles.output_warps, num_stages=tiles.output_stages, maxnreg=tiles.output_registers,
    )  # fmt: skip
