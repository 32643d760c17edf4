"""Gated delta rule scan in Triton: shapes, contract, numerics and source are those of headrace/kernels/gdn/prefill.py.

Three kernels: U and W of each chunk (systems.py); states, with a program for each sequence, head and tile of the state
that loops over the sequence's chunks and turns U into V' (on Hopper, where it fits: scan_hopper.py); outputs. Norms,
decays and beta scale the small matrices between products, so that keys, queries and values go to the matrix units as
they are.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.rms_norm import L2_NORM_EPS
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.scan_hopper import fits_hopper, launch_states_hopper
from headrace.kernels.gdn.systems import launch_systems
from headrace.kernels.lib.chunks import ChunkTable
from headrace.kernels.lib.dot import dot, dot_block
from headrace.kernels.lib.segments import PrefillSegments
from headrace.kernels.lib.sizes import cdiv


@triton.jit
def _gdn_states_kernel(
    k_ptr,
    u_ptr,
    w_ptr,
    decay_ptr,
    to_end_ptr,
    start_ptr,
    pool_ptr,
    chunks_ptr,
    sequences_ptr,
    k_stride,
    slot_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """start [C, H, V, K], the state before each chunk; V' = u - w start, in place of u; and the states to write:
    the only loop over time."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, key = tl.arange(0, Q), tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = key < K, value < V
    in_state = in_k[:, None] & in_v[None, :]
    place, start_place = key[:, None] * V + value[None, :], key[:, None] + value[None, :] * K
    k_ptr += head // R * K
    pool_ptr += head * K * V

    first_chunk = tl.load(sequences_ptr + sequence * 4)
    end_chunk = tl.load(sequences_ptr + sequence * 4 + 1)
    src = tl.load(sequences_ptr + sequence * 4 + 2).to(tl.int64)
    found = (key < tl.where(src >= 0, K, 0))[:, None] & in_v[None, :]
    state = tl.load(pool_ptr + src * slot_stride + place, mask=found, other=0.0).to(tl.float32)
    next_decay = tl.load(decay_ptr + (first_chunk * H + head) * Q + Q - 1)
    for chunk in range(first_chunk, end_chunk):
        first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
        num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
        dst = tl.load(chunks_ptr + chunk * 4 + 2).to(tl.int64)
        tile = tl.cast(chunk * H + head, tl.int64)
        decay_whole = next_decay  # loaded a chunk ahead, as the compiler does for operands of products
        next_decay = tl.load(decay_ptr + ((chunk + 1) * H + head) * Q + Q - 1, mask=chunk + 1 < end_chunk, other=0.0)
        rounded = state.to(start_ptr.dtype.element_ty)
        tl.store(start_ptr + tile * (K * V) + start_place, rounded, mask=in_state)

        w = tl.load(w_ptr + tile * (Q * K) + row[:, None] * K + key[None, :], mask=in_k[None, :], other=0.0)
        u_place = u_ptr + tile * (Q * V) + row[:, None] + value[None, :] * Q
        u = tl.load(u_place, mask=in_v[None, :], other=0.0)
        values = u.to(tl.float32) - dot(w, rounded)
        tl.store(u_place, values.to(u_ptr.dtype.element_ty), mask=in_v[None, :])

        chunk_rows = (chunk * H + head) * Q
        to_end = tl.load(to_end_ptr + chunk_rows + row)
        in_rows = in_k[:, None] & (row < num_rows)[None, :]
        k = tl.load(k_ptr + first_row * k_stride + row[None, :] * k_stride + key[:, None], mask=in_rows, other=0.0)
        weighted = (values * to_end[:, None]).to(k_ptr.dtype.element_ty)
        state = dot(k, weighted, state * tl.exp2(decay_whole))
        if dst >= 0:  # a branch, not a mask: most chunks also skip the conversion through shared memory
            tl.store(pool_ptr + dst * slot_stride + place, state.to(pool_ptr.dtype.element_ty), mask=in_state)


@triton.jit
def _gdn_output_kernel(
    q_ptr,
    k_ptr,
    values_ptr,
    decay_ptr,
    start_ptr,
    o_ptr,
    chunks_ptr,
    q_stride,
    k_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EPS: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """o of one chunk for BLOCK_V columns of the value heads of one key head."""
    key_head, chunk = tl.program_id(1), tl.program_id(2)
    num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    if num_rows <= 0:
        return
    first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    row, key = tl.arange(0, Q), tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside, in_k, in_v = row < num_rows, key < K, value < V
    in_rows = inside[:, None] & in_k[None, :]
    column = (key_head * K + key)[None, :]
    q = tl.load(q_ptr + first_row * q_stride + row[:, None] * q_stride + column, mask=in_rows, other=0.0)
    k = tl.load(k_ptr + first_row * k_stride + row[:, None] * k_stride + column, mask=in_rows, other=0.0)
    q_float, k_float = q.to(tl.float32), k.to(tl.float32)
    q_over_norm = tl.rsqrt(tl.sum(q_float * q_float, 1) + EPS) * (K**-0.5)
    k_over_norm = tl.rsqrt(tl.sum(k_float * k_float, 1) + EPS)
    score = tl.where(row[:, None] >= row[None, :], dot(q, tl.trans(k)) * k_over_norm[None, :], 0.0)

    for head in range(key_head * R, key_head * R + R):
        tile = tl.cast(chunk * H + head, tl.int64)
        decay = tl.load(decay_ptr + tile * Q + row)
        start_KV = start_ptr + tile * (K * V) + key[:, None] + value[None, :] * K
        start = tl.load(start_KV, mask=in_k[:, None] & in_v[None, :], other=0.0)
        values_QV = values_ptr + tile * (Q * V) + row[:, None] + value[None, :] * Q
        values = tl.load(values_QV, mask=in_v[None, :], other=0.0)
        o = dot(q, start) * tl.exp2(decay)[:, None]
        # Above the diagonal the score is 0; the minimum keeps the factor finite there.
        weight = score * tl.exp2(tl.minimum(decay[:, None] - decay[None, :], 0.0))
        o = dot(weight.to(values.dtype), values, o) * q_over_norm[:, None]
        out = o_ptr + first_row * (H * V) + row[:, None] * (H * V) + (head * V + value)[None, :]
        tl.store(out, o.to(o_ptr.dtype.element_ty), mask=inside[:, None] & in_v[None, :])


class GdnTiles(NamedTuple):
    """Tile sizes, warps, pipeline stages and register limits of the three kernels."""

    chunk_size: int
    state_columns: int  # of V, for a program of the states kernel
    output_columns: int  # of V, for a program of the output kernel
    systems_warps: int = 4
    systems_registers: int | None = None
    states_warps: int = 4
    states_stages: int = 5  # half of them for the table of the chunks' rows
    output_warps: int = 4
    output_stages: int = 2
    output_registers: int | None = None


def gdn_tiles(dtype: torch.dtype) -> GdnTiles:
    if dtype == torch.float32:
        # For exactness, not speed: float32 products run outside the matrix units, with their operands in registers.
        return GdnTiles(
            32, state_columns=16, output_columns=32, systems_warps=8, states_warps=8, states_stages=1, output_warps=8
        )
    # At 168 registers three programs fit on a multiprocessor: worth more than the few words that are spilled.
    return GdnTiles(64, state_columns=32, output_columns=64, systems_registers=168, output_registers=168)


def gdn_prefill_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    heads: GdnHeads,
    state_pool: Tensor,
    segments: PrefillSegments,
    tiles: GdnTiles | None = None,
) -> Tensor:
    # Each row of an input and each slot of the pool is contiguous; rows and slots may be apart.
    inputs = (("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("state pool", state_pool))
    for name, tensor in inputs:
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if len(v) == 0:
        return o
    tiles = tiles or gdn_tiles(v.dtype)
    table = segments.chunk_table(tiles.chunk_size)
    u, w, decay, to_end = launch_systems(
        k, v, a, b, heads, table, tiles.chunk_size, tiles.systems_warps, tiles.systems_registers
    )
    start = _launch_states(k, u, w, decay, to_end, state_pool, table, tiles)
    _launch_outputs(q, k, u, decay, start, o, table, tiles)
    return o


def _launch_states(
    k: Tensor,
    u: Tensor,
    w: Tensor,
    decay: Tensor,
    to_end: Tensor,
    state_pool: Tensor,
    table: ChunkTable,
    tiles: GdnTiles,
) -> Tensor:
    num_chunks, H, V, Q = u.shape
    Hk, K = k.shape[1:]
    start = u.new_empty((num_chunks, H, V, K))
    if fits_hopper(k, V, Q):
        launch_states_hopper(k, u, w, decay, to_end, start, state_pool, table)
        return start
    block_v = min(tiles.state_columns, dot_block(V))
    _gdn_states_kernel[(cdiv(V, block_v), H, len(table.sequences_N4))](
        k,
        u,
        w,
        decay,
        to_end,
        start,
        state_pool,
        table.chunks_C4,
        table.sequences_N4,
        k.stride(0),
        state_pool.stride(0),
        H=H,
        R=H // Hk,
        K=K,
        V=V,
        Q=Q,
        BLOCK_K=dot_block(K),
        BLOCK_V=block_v,
        num_warps=tiles.states_warps,
        num_stages=tiles.states_stages,
    )
    return start


def _launch_outputs(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    decay: Tensor,
    start: Tensor,
    o: Tensor,
    table: ChunkTable,
    tiles: GdnTiles,
) -> None:
    num_chunks, H, V, Q = values.shape
    Hk, K = k.shape[1:]
    block_v = min(tiles.output_columns, dot_block(V))
    _gdn_output_kernel[(cdiv(V, block_v), Hk, num_chunks)](
        q,
        k,
        values,
        decay,
        start,
        o,
        table.chunks_C4,
        q.stride(0),
        k.stride(0),
        H=H,
        R=H // Hk,
        K=K,
        V=V,
        EPS=L2_NORM_EPS,
        Q=Q,
        BLOCK_K=dot_block(K),
        BLOCK_V=block_v,
        num_warps=tiles.output_warps,
        num_stages=tiles.output_stages,
        maxnreg=tiles.output_registers,
    )
