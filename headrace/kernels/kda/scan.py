"""Kimi delta attention's scan in Triton: shapes, contract, numerics and source as in headrace/kernels/kda/prefill.py.

Four kernels: log decays of each chunk's rows; what only needs the chunk itself (U, W, scores, and queries and keys with
their decays); states, with a program for each sequence, head and tile of the state that loops over the sequence's
chunks and turns U into V'; outputs.

Legend    C chunks, Q rows a chunk
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.rms_norm import L2_NORM_EPS
from headrace.kernels.gdn.heads import log_decay
from headrace.kernels.gdn.systems import inverse_of_unit_lower
from headrace.kernels.kda.heads import KdaHeads
from headrace.kernels.lib.chunks import ChunkTable
from headrace.kernels.lib.dot import dot, dot_block
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.segments import PrefillSegments
from headrace.kernels.lib.sizes import cdiv


@triton.jit
def _kda_decay_kernel(
    f_ptr, A_ptr, bias_ptr, decay_ptr, chunks_ptr, f_stride,
    H: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """decay [C, H, Q, K] float32: log2 of the decay since the chunk's start; in padding rows the whole chunk's."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    row, key = tl.arange(0, Q), tl.arange(0, BLOCK_K)
    first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    if num_rows < 0:
        return
    in_k = key < K
    inside = (row < num_rows)[:, None] & in_k[None, :]
    f = tl.load(f_ptr + (first_row + row)[:, None] * f_stride + (head * K + key)[None, :], mask=inside, other=0.0)
    bias = tl.load(bias_ptr + head * K + key, mask=in_k, other=0.0)
    g = tl.where(inside, log_decay(f, bias[None, :], tl.load(A_ptr + head)) * LOG2_E, 0.0)
    place = tl.cast(chunk * H + head, tl.int64) * (Q * K) + row[:, None] * K + key[None, :]
    tl.store(decay_ptr + place, tl.cumsum(g, 0), mask=in_k[None, :])


@triton.jit
def _kda_systems_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, decay_ptr, u_ptr, w_ptr, score_ptr, from_start_ptr, to_end_ptr, chunks_ptr,
    q_stride, k_stride, v_stride, b_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, EPS: tl.constexpr, Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, LEVELS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One chunk for one head: u [Q, V], w [Q, K], the queries' decayed scores with keys [Q, Q], queries with the decay
    from the chunk's start and keys with that to its end [Q, K]; all zero in padding rows."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    row, key, value = tl.arange(0, Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    if num_rows < 0:
        return
    inside, in_k = row < num_rows, (key < K)[None, :]
    packed = first_row + row
    in_rows, column = inside[:, None] & in_k, (head * K + key)[None, :]
    k = tl.load(k_ptr + packed[:, None] * k_stride + column, mask=in_rows, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + packed[:, None] * q_stride + column, mask=in_rows, other=0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, 1) + EPS)[:, None]
    q *= (tl.rsqrt(tl.sum(q * q, 1) + EPS) * (K**-0.5))[:, None]
    tile = tl.cast(chunk * H + head, tl.int64)
    decay_ptr += tile * (Q * K) + key[None, :]
    decay = tl.load(decay_ptr + row[:, None] * K, mask=in_k, other=0.0)

    dtype: tl.constexpr = u_ptr.dtype.element_ty
    apart = row[:, None] ^ row[None, :]  # the highest bit is the level at which two rows meet
    system = tl.zeros([Q, Q], tl.float32)
    score = tl.where(apart == 0, tl.sum(q * k, 1)[:, None], 0.0)
    for level in range(LEVELS):  # a loop: unrolled, its loads would all be made first and fill the registers
        # Between two halves both decays are taken from the first one's last row: both factors are at most 1.
        middle_row = (row >> (level + 1) << (level + 1)) + (1 << level) - 1
        middle = tl.load(decay_ptr + middle_row[:, None] * K, mask=in_k, other=0.0)
        factor = tl.exp2(-tl.abs(decay - middle))
        after = (k * factor).to(dtype)
        columns = tl.trans(after)
        below = (apart >> level == 1) & (row[:, None] > row[None, :])
        system += tl.where(below, dot(after, columns), 0.0)
        score += tl.where(below, dot((q * factor).to(dtype), columns), 0.0)
    square = tile * (Q * Q) + row[:, None] * Q + row[None, :]
    tl.store(score_ptr + square, score.to(dtype))

    place = tile * (Q * K) + row[:, None] * K + key[None, :]
    since_start = tl.exp2(decay)
    tl.store(from_start_ptr + place, (q * since_start).to(dtype), mask=in_k)
    whole = tl.load(decay_ptr + (Q - 1) * K, mask=in_k, other=0.0)
    tl.store(to_end_ptr + place, (k * tl.exp2(whole - decay)).to(dtype), mask=in_k)

    beta = tl.sigmoid(tl.load(b_ptr + packed * b_stride + head, mask=inside, other=0.0).to(tl.float32))
    inverse = inverse_of_unit_lower(system * beta[:, None], Q, EXACT)
    weighted = (inverse * beta[None, :]).to(dtype)
    tl.store(w_ptr + place, dot(weighted, (k * since_start).to(dtype)).to(dtype), mask=in_k)
    in_v = inside[:, None] & (value < V)[None, :]
    v = tl.load(v_ptr + packed[:, None] * v_stride + (head * V + value)[None, :], mask=in_v, other=0.0)
    u_place = u_ptr + tile * (Q * V) + row[:, None] * V + value[None, :]
    tl.store(u_place, dot(weighted, v).to(dtype), mask=(value < V)[None, :])


@triton.jit
def _kda_states_kernel(
    u_ptr, w_ptr, to_end_ptr, decay_ptr, start_ptr, pool_ptr, chunks_ptr, sequences_ptr, slot_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """start [C, H, K, V], the state before each chunk; V' = u - w start, in place of u; and the states to write:
    the only loop over time."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, key = tl.arange(0, Q), tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = key < K, value < V
    in_state = in_k[:, None] & in_v[None, :]
    place = key[:, None] * V + value[None, :]
    pool_ptr += head * K * V
    first_chunk = tl.load(sequences_ptr + sequence * 4)
    end_chunk = tl.load(sequences_ptr + sequence * 4 + 1)
    src = tl.load(sequences_ptr + sequence * 4 + 2).to(tl.int64)
    found = (key < tl.where(src >= 0, K, 0))[:, None] & in_v[None, :]
    state = tl.load(pool_ptr + src * slot_stride + place, mask=found, other=0.0).to(tl.float32)
    for chunk in range(first_chunk, end_chunk):
        dst = tl.load(chunks_ptr + chunk * 4 + 2).to(tl.int64)
        tile = tl.cast(chunk * H + head, tl.int64)
        whole = tl.load(decay_ptr + tile * (Q * K) + (Q - 1) * K + key, mask=in_k, other=0.0)
        rounded = state.to(start_ptr.dtype.element_ty)
        tl.store(start_ptr + tile * (K * V) + place, rounded, mask=in_state)
        w = tl.load(w_ptr + tile * (Q * K) + row[:, None] * K + key[None, :], mask=in_k[None, :], other=0.0)
        u_place = u_ptr + tile * (Q * V) + row[:, None] * V + value[None, :]
        u = tl.load(u_place, mask=in_v[None, :], other=0.0)
        values = (u.to(tl.float32) - dot(w, rounded)).to(u_ptr.dtype.element_ty)
        tl.store(u_place, values, mask=in_v[None, :])
        k = tl.load(to_end_ptr + tile * (Q * K) + row[None, :] * K + key[:, None], mask=in_k[:, None], other=0.0)
        state = dot(k, values, state * tl.exp2(whole)[:, None])
        if dst >= 0:
            tl.store(pool_ptr + dst * slot_stride + place, state.to(pool_ptr.dtype.element_ty), mask=in_state)


@triton.jit
def _kda_output_kernel(
    from_start_ptr, start_ptr, score_ptr, values_ptr, o_ptr, chunks_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """o of one chunk for BLOCK_V columns of one head."""
    head, chunk = tl.program_id(1), tl.program_id(2)
    num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    if num_rows <= 0:
        return
    first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    row, key = tl.arange(0, Q), tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = key < K, (value < V)[None, :]
    tile = tl.cast(chunk * H + head, tl.int64)
    q = tl.load(from_start_ptr + tile * (Q * K) + row[:, None] * K + key[None, :], mask=in_k[None, :], other=0.0)
    start_place = start_ptr + tile * (K * V) + key[:, None] * V + value[None, :]
    o = dot(q, tl.load(start_place, mask=in_k[:, None] & in_v, other=0.0))
    score = tl.load(score_ptr + tile * (Q * Q) + row[:, None] * Q + row[None, :])
    values = tl.load(values_ptr + tile * (Q * V) + row[:, None] * V + value[None, :], mask=in_v, other=0.0)
    o = dot(score, values, o)
    out = o_ptr + (first_row + row)[:, None] * (H * V) + (head * V + value)[None, :]
    tl.store(out, o.to(o_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & in_v)


class KdaTiles(NamedTuple):
    """Tile sizes, warps and pipeline stages of the four kernels."""

    chunk_size: int
    state_columns: int  # of V, for a program of the states kernel
    output_columns: int  # of V, for a program of the output kernel
    systems_warps: int = 8
    states_warps: int = 4
    states_stages: int = 3
    output_warps: int = 4


def kda_tiles(dtype: torch.dtype) -> KdaTiles:
    if dtype == torch.float32:
        # For exactness, not speed: float32 products run outside the matrix units, with their operands in registers.
        return KdaTiles(32, state_columns=16, output_columns=32, states_warps=8, states_stages=1, output_warps=8)
    return KdaTiles(64, state_columns=32, output_columns=64)


def kda_prefill_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    heads: KdaHeads,
    state_pool: Tensor,
    segments: PrefillSegments,
    tiles: KdaTiles | None = None,
) -> Tensor:
    # Each row of an input and each slot of the pool is contiguous; rows and slots may be apart.
    for name, tensor in (("q", q), ("k", k), ("v", v), ("f", f), ("b", b), ("state pool", state_pool)):
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if len(v) == 0:
        return o
    tiles = tiles or kda_tiles(v.dtype)
    table = segments.chunk_table(tiles.chunk_size)
    (_, H, V), K, Q, C = v.shape, k.shape[2], tiles.chunk_size, len(table.chunks_C4)
    sizes = {"H": H, "K": K, "Q": Q, "BLOCK_K": dot_block(K)}
    decay = v.new_empty((C, H, Q, K), dtype=torch.float32)
    _kda_decay_kernel[(H, C)](f, heads.A, heads.dt_bias, decay, table.chunks_C4, f.stride(0), **sizes, num_warps=4)
    w, from_start, to_end = v.new_empty((3, C, H, Q, K))
    u, score = v.new_empty((C, H, Q, V)), v.new_empty((C, H, Q, Q))
    _kda_systems_kernel[(H, C)](
        q, k, v, b, decay, u, w, score, from_start, to_end, table.chunks_C4,
        q.stride(0), k.stride(0), v.stride(0), b.stride(0),
        **sizes, V=V, EPS=L2_NORM_EPS, BLOCK_V=dot_block(V), LEVELS=Q.bit_length() - 1, EXACT=v.dtype == torch.float32,
        num_warps=tiles.systems_warps, num_stages=1,
    )  # fmt: skip
    start = _launch_states(u, w, to_end, decay, state_pool, table, tiles)
    block_v = min(tiles.output_columns, dot_block(V))
    _kda_output_kernel[(cdiv(V, block_v), H, C)](
        from_start, start, score, u, o, table.chunks_C4, **sizes, V=V, BLOCK_V=block_v, num_warps=tiles.output_warps
    )
    return o


def _launch_states(
    u: Tensor, w: Tensor, to_end: Tensor, decay: Tensor, state_pool: Tensor, table: ChunkTable, tiles: KdaTiles
) -> Tensor:
    C, H, Q, K = w.shape
    V = u.shape[3]
    start = u.new_empty((C, H, K, V))
    block_v = min(tiles.state_columns, dot_block(V))
    _kda_states_kernel[(cdiv(V, block_v), H, len(table.sequences_N4))](
        u, w, to_end, decay, start, state_pool, table.chunks_C4, table.sequences_N4, state_pool.stride(0),
        H=H, K=K, V=V, Q=Q, BLOCK_K=dot_block(K), BLOCK_V=block_v,
        num_warps=tiles.states_warps, num_stages=tiles.states_stages,
    )  # fmt: skip
    return start
