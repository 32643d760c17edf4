"""Mamba2 (SSD) scan in Triton: shapes, contract, numerics and source are those of headrace/kernels/ssd/prefill.py.

Three kernels: log decays of all chunks; states, with a program for each sequence, head and tile of the state that loops
over the sequence's chunks; outputs, with a program for each chunk and a few heads, which share the products of C and B
(on Hopper, where it fits: scan_hopper.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.chunks import ChunkTable
from headrace.kernels.lib.dot import dot, dot_block, swizzle_block
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.segments import PrefillSegments
from headrace.kernels.lib.sizes import cdiv, next_power_of_2
from headrace.kernels.ssd.heads import SsdHeads, time_step
from headrace.kernels.ssd.scan_hopper import fits_hopper, launch_outputs_hopper


@triton.jit
def _ssd_decay_kernel(
    dt_ptr,
    A_ptr,
    bias_ptr,
    decay_ptr,
    chunk_dt_ptr,
    chunks_ptr,
    dt_stride,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
    H: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """decay [C, H, Q], log2 of the decay since the chunk's start, and dt as [C, H, Q]; padding rows have dt 0, so
    that each chunk's last entry is its whole decay."""
    chunk = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.arange(0, Q)
    first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    in_heads = head < H
    inside = (row < num_rows)[:, None] & in_heads[None, :]
    place = (first_row + row)[:, None] * dt_stride + head[None, :]
    A = tl.load(A_ptr + head, mask=in_heads, other=0.0)
    bias = tl.load(bias_ptr + head, mask=in_heads, other=0.0)
    raw = tl.load(dt_ptr + place, mask=inside, other=0.0)
    dt = tl.where(inside, time_step(raw, bias[None, :], DT_MIN, DT_MAX), 0.0)
    decay = tl.cumsum(dt * (A * LOG2_E)[None, :], axis=0)
    out = (chunk * H + head)[None, :] * Q + row[:, None]
    tl.store(decay_ptr + out, decay, mask=in_heads[None, :])
    tl.store(chunk_dt_ptr + out, dt, mask=in_heads[None, :])


@triton.jit
def _ssd_states_kernel(
    x_ptr,
    B_ptr,
    decay_ptr,
    chunk_dt_ptr,
    start_ptr,
    pool_ptr,
    chunks_ptr,
    sequences_ptr,
    x_stride,  # the strides are those of rows, and of slots
    B_stride,
    slot_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """start [C, H, P, N], the state before each chunk, and the states to write: the only loop over time."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, p = tl.arange(0, Q), tl.arange(0, BLOCK_P)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    in_state = in_p[:, None] & in_n[None, :]
    place = p[:, None] * N + n[None, :]
    x_ptr += head * P
    B_ptr += head // HEADS_A_GROUP * N
    pool_ptr += head * P * N

    first_chunk = tl.load(sequences_ptr + sequence * 4)
    end_chunk = tl.load(sequences_ptr + sequence * 4 + 1)
    src = tl.load(sequences_ptr + sequence * 4 + 2).to(tl.int64)
    found = (p < tl.where(src >= 0, P, 0))[:, None] & in_n[None, :]
    state = tl.load(pool_ptr + src * slot_stride + place, mask=found, other=0.0).to(tl.float32)
    for chunk in range(first_chunk, end_chunk):
        first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
        num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
        dst = tl.load(chunks_ptr + chunk * 4 + 2).to(tl.int64)
        start = start_ptr + tl.cast(chunk * H + head, tl.int64) * (P * N) + place
        tl.store(start, state.to(start_ptr.dtype.element_ty), mask=in_state)

        inside = row < num_rows
        chunk_rows = (chunk * H + head) * Q
        decay = tl.load(decay_ptr + chunk_rows + row)
        decay_whole = tl.load(decay_ptr + chunk_rows + Q - 1)
        weight = tl.exp2(decay_whole - decay) * tl.load(chunk_dt_ptr + chunk_rows + row)
        x_rows = x_ptr + first_row * x_stride
        x = tl.load(x_rows + row[None, :] * x_stride + p[:, None], mask=inside[None, :] & in_p[:, None], other=0.0)
        B_rows = B_ptr + first_row * B_stride
        B = tl.load(B_rows + row[:, None] * B_stride + n[None, :], mask=inside[:, None] & in_n[None, :], other=0.0)
        weighted = (x.to(tl.float32) * weight[None, :]).to(x_ptr.dtype.element_ty)
        state = dot(weighted, B, state * tl.exp2(decay_whole))
        if dst >= 0:  # a branch, not a mask: most chunks also skip the conversion through shared memory
            tl.store(pool_ptr + dst * slot_stride + place, state.to(pool_ptr.dtype.element_ty), mask=in_state)


@triton.jit
def _ssd_output_kernel(
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
    """y for BLOCK_M rows of a chunk and HEADS heads of one group."""
    first_head, chunk = tl.program_id(1) * HEADS, tl.program_id(2)
    first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    if tl.program_id(0) * BLOCK_M >= num_rows:
        return
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q, p, n = tl.arange(0, Q), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    in_m, in_q, in_p, in_n = m < num_rows, q < num_rows, p < P, n < N
    group = first_head // HEADS_A_GROUP * N
    C_rows = C_ptr + first_row * C_stride + group
    C = tl.load(C_rows + m[:, None] * C_stride + n[None, :], mask=in_m[:, None] & in_n[None, :], other=0.0)
    B_rows = B_ptr + first_row * B_stride + group
    B = tl.load(B_rows + q[:, None] * B_stride + n[None, :], mask=in_q[:, None] & in_n[None, :], other=0.0)
    score = tl.where(m[:, None] >= q[None, :], dot(C, tl.trans(B)), 0.0)

    x_ptr += first_row * x_stride
    y_ptr += first_row * (H * P)
    for head in range(first_head, first_head + HEADS):
        chunk_rows = (chunk * H + head) * Q
        decay_m = tl.load(decay_ptr + chunk_rows + m)
        decay_q = tl.load(decay_ptr + chunk_rows + q)
        dt = tl.load(chunk_dt_ptr + chunk_rows + q)
        D = tl.load(D_ptr + head).to(tl.float32)
        x = tl.load(
            x_ptr + q[:, None] * x_stride + (head * P + p)[None, :], mask=in_q[:, None] & in_p[None, :], other=0.0
        )
        start_PN = start_ptr + tl.cast(chunk * H + head, tl.int64) * (P * N) + p[:, None] * N + n[None, :]
        start = tl.load(start_PN, mask=in_p[:, None] & in_n[None, :], other=0.0)
        # Above the diagonal the score is 0; the minimum keeps the factor finite there.
        weight = score * tl.exp2(tl.minimum(decay_m[:, None] - decay_q[None, :], 0.0)) * dt[None, :]
        weight += tl.where(m[:, None] == q[None, :], D, 0.0)
        y = dot(C, tl.trans(start)) * tl.exp2(decay_m)[:, None]
        y = dot(weight.to(x_ptr.dtype.element_ty), x, y)
        out = y_ptr + m[:, None] * (H * P) + (head * P + p)[None, :]
        tl.store(out, y.to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_p[None, :])


class SsdTiles(NamedTuple):
    """Tile sizes, warps and pipeline stages of the three kernels."""

    chunk_size: int
    state_columns: int  # of N, for a program of the states kernel
    output_rows: int  # of a chunk, for a program of the output kernel
    output_heads: int
    states_warps: int = 4
    states_stages: int = 5  # half of them for the table of the chunks' rows
    output_warps: int = 4
    output_stages: int = 2


FEW_ROWS = 512  # up to here a program computes one head's outputs: multiprocessors are left for that


def ssd_tiles(dtype: torch.dtype, heads_a_group: int, state_size: int, num_rows: int) -> SsdTiles:
    if dtype == torch.float32:
        # For exactness, not speed: float32 products run outside the matrix units, with their operands in registers.
        return SsdTiles(chunk_size=32, state_columns=32, output_rows=32, output_heads=1, output_warps=8)
    chunk_size = 128 if state_size <= 128 else 64  # shared memory holds a chunk's B and C
    # The largest power of two that divides the group's heads.
    shared_heads = 1 if num_rows <= FEW_ROWS else heads_a_group & -heads_a_group
    return SsdTiles(chunk_size, state_columns=64, output_rows=64, output_heads=min(8, shared_heads))


def ssd_prefill_triton(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    heads: SsdHeads,
    state_pool: Tensor,
    segments: PrefillSegments,
    tiles: SsdTiles | None = None,
) -> Tensor:
    T, H, P = x.shape
    G, N = B.shape[1:]
    # Each row of an input and each slot of the pool is contiguous; rows and slots may be apart.
    for name, tensor in (("x", x), ("dt", dt), ("B", B), ("C", C), ("state pool", state_pool)):
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
    y = torch.empty((T, H, P), dtype=x.dtype, device=x.device)
    if T == 0:
        return y
    tiles = tiles or ssd_tiles(x.dtype, H // G, N, T)
    table = segments.chunk_table(tiles.chunk_size)
    decay, chunk_dt = _launch_decays(dt, heads, table, tiles)
    start = _launch_states(x, B, decay, chunk_dt, state_pool, table, tiles)
    _launch_outputs(x, B, C, heads.D, decay, chunk_dt, start, y, table, tiles)
    return y


def _launch_decays(dt: Tensor, heads: SsdHeads, table: ChunkTable, tiles: SsdTiles) -> tuple[Tensor, Tensor]:
    H, num_chunks = dt.shape[1], len(table.chunks_C4)
    decay, chunk_dt = dt.new_empty((2, num_chunks, H, tiles.chunk_size), dtype=torch.float32)
    block_h = min(16, next_power_of_2(H))
    _ssd_decay_kernel[(num_chunks, cdiv(H, block_h))](
        dt, heads.A, heads.dt_bias, decay, chunk_dt, table.chunks_C4, dt.stride(0),
        DT_MIN=heads.dt_min, DT_MAX=heads.dt_max, H=H, Q=tiles.chunk_size, BLOCK_H=block_h,
    )  # fmt: skip
    return decay, chunk_dt


def _launch_states(
    x: Tensor, B: Tensor, decay: Tensor, chunk_dt: Tensor, state_pool: Tensor, table: ChunkTable, tiles: SsdTiles
) -> Tensor:
    H, P = x.shape[1:]
    G, N = B.shape[1:]
    start = x.new_empty((len(table.chunks_C4), H, P, N))
    block_n = min(tiles.state_columns, dot_block(N))
    _ssd_states_kernel[(cdiv(N, block_n), H, len(table.sequences_N4))](
        x,
        B,
        decay,
        chunk_dt,
        start,
        state_pool,
        table.chunks_C4,
        table.sequences_N4,
        x.stride(0),
        B.stride(0),
        state_pool.stride(0),
        H=H,
        P=P,
        N=N,
        HEADS_A_GROUP=H // G,
        Q=tiles.chunk_size,
        BLOCK_P=dot_block(P),
        BLOCK_N=block_n,
        num_warps=tiles.states_warps,
        num_stages=tiles.states_stages,
    )
    return start


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
    tiles: SsdTiles,
) -> None:
    H, P = x.shape[1:]
    G, N = B.shape[1:]
    if tiles.output_heads > 1 and fits_hopper(x, B, C, tiles.chunk_size):  # Triton 3.6 cannot compile one
        launch_outputs_hopper(x, B, C, D, decay, chunk_dt, start, y, table, tiles.output_heads)
        return
    grid = (tiles.chunk_size // tiles.output_rows, H // tiles.output_heads, len(table.chunks_C4))
    _ssd_output_kernel[grid](
        x,
        B,
        C,
        D,
        decay,
        chunk_dt,
        start,
        y,
        table.chunks_C4,
        x.stride(0),
        B.stride(0),
        C.stride(0),
        H=H,
        P=P,
        N=N,
        HEADS_A_GROUP=H // G,
        HEADS=tiles.output_heads,
        Q=tiles.chunk_size,
        BLOCK_M=tiles.output_rows,
        BLOCK_P=swizzle_block(P, x.dtype),
        BLOCK_N=swizzle_block(N, x.dtype),
        num_warps=tiles.output_warps,
        num_stages=tiles.output_stages,
    )
