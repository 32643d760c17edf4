"""The Triton form of `kernels.gdn_prefill`: shapes, contract, numerics and source stand there.

The Triton form has three kernels: U and W of each chunk; states, with a program for each sequence, head and
tile of the state that walks over the sequence's chunks and turns U into V' (on Hopper, where it fits, by hand:
gdn_states_hopper.py); outputs. Norms, decays and beta scale the small matrices between products, so that keys,
queries and values go to the matrix units as they are.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chunks import ChunkTable
from kernels.dot import dot, dot_block
from kernels.gdn_heads import GdnHeads, log_decay
from kernels.gdn_states_hopper import fits_hopper, launch_states_hopper
from kernels.pdl import fetch
from kernels.rms_norm import L2_NORM_EPS
from kernels.segments import PrefillSegments
from kernels.sizes import cdiv

LOG2_E = tl.constexpr(1.4426950408889634)  # decays are powers of two in the kernels: exp2 is one instruction


@triton.jit
def _inverse_of_unit_lower(system, Q: tl.constexpr, EXACT: tl.constexpr):
    """(I + system)^-1 for a strictly lower triangular system [Q, Q], Q a power of two.

    Known inverses X, Y of two neighbouring diagonal blocks give that of both with the block A below X:
    [[X, 0], [-Y A X, Y]]. All pairs of one size at once, sizes 1, 2, 4, ... Q / 2. The product Y A is that of all
    known inverses and the whole system, of which all but the blocks A is dropped: the system is made a factor once.
    """
    apart = tl.arange(0, Q)[:, None] ^ tl.arange(0, Q)[None, :]  # its highest bit: the level at which two rows meet
    inverse = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, system, 0.0)
    dtype: tl.constexpr = tl.float32 if EXACT else tl.float16
    factor = system.to(dtype)
    for level in tl.static_range(1, 7):  # up to Q = 128
        if 2**level < Q:
            product = tl.where(apart >> level == 1, dot(inverse.to(dtype), factor), 0.0)
            inverse -= dot(product.to(dtype), inverse.to(dtype))
    return inverse


@triton.jit
def _gdn_systems_kernel(
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_ptr,
    bias_ptr,
    u_ptr,
    w_ptr,
    decay_ptr,
    to_end_ptr,
    chunks_ptr,
    k_stride,  # the strides are those of rows
    v_stride,
    a_stride,
    b_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EPS: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EXACT: tl.constexpr,
    FETCH: tl.constexpr,
):
    """For one chunk and value head: u [C, H, V, Q] and w [C, H, Q, K] of (I + A) [u, w] = [beta v, beta e^decay k];
    decay [C, H, Q], log2 of the decay since the chunk's start, whose last entry is the chunk's whole decay; to_end
    [C, H, Q], the decay from each row to the chunk's end over its key's norm. All are zero in padding rows but
    for the decay."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    row, key, value = tl.arange(0, Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    if num_rows < 0:
        return
    inside = row < num_rows
    packed = first_row + row
    if FETCH:  # values are needed last; there is no room for them before
        fetch(v_ptr + tl.where(inside, packed, 0) * v_stride + head * V, V * 2)
    a = tl.load(a_ptr + packed * a_stride + head, mask=inside, other=0.0)
    b = tl.load(b_ptr + packed * b_stride + head, mask=inside, other=0.0)
    g = tl.where(inside, log_decay(a, tl.load(bias_ptr + head), tl.load(A_ptr + head)), 0.0)
    beta = tl.where(inside, tl.sigmoid(b.to(tl.float32)), 0.0)
    in_k = inside[:, None] & (key < K)[None, :]
    k = tl.load(k_ptr + packed[:, None] * k_stride + (head // R * K + key)[None, :], mask=in_k, other=0.0)
    k_float = k.to(tl.float32)
    over_norm = tl.rsqrt(tl.sum(k_float * k_float, 1) + EPS)
    decay = tl.cumsum(g * LOG2_E, 0)
    decay_whole = tl.sum(g, 0) * LOG2_E
    chunk_rows = (chunk * H + head) * Q
    tl.store(decay_ptr + chunk_rows + row, decay)
    tl.store(to_end_ptr + chunk_rows + row, tl.where(inside, tl.exp2(decay_whole - decay) * over_norm, 0.0))

    weight = tl.exp2(tl.minimum(decay[:, None] - decay[None, :], 0.0)) * (beta * over_norm)[:, None]
    system = dot(k, tl.trans(k)) * weight * over_norm[None, :]
    inverse = _inverse_of_unit_lower(tl.where(row[:, None] > row[None, :], system, 0.0), Q, EXACT)

    tile = tl.cast(chunk_rows, tl.int64)
    w = dot((inverse * (beta * over_norm * tl.exp2(decay))[None, :]).to(k.dtype), k)
    w_place = w_ptr + tile * K + row[:, None] * K + key[None, :]
    tl.store(w_place, w.to(w_ptr.dtype.element_ty), mask=(key < K)[None, :])
    in_v = inside[:, None] & (value < V)[None, :]
    v = tl.load(v_ptr + packed[:, None] * v_stride + (head * V + value)[None, :], mask=in_v, other=0.0)
    u = dot((inverse * beta[None, :]).to(v.dtype), v)
    u_place = u_ptr + tile * V + row[:, None] + value[None, :] * Q
    tl.store(u_place, u.to(u_ptr.dtype.element_ty), mask=(value < V)[None, :])


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
        decay_whole = next_decay  # a chunk ahead of its use, as the compiler does for all that products take
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
        if dst >= 0:  # a branch, no mask: most chunks skip the way through shared memory, too
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
    """How the Triton form cuts the work."""

    chunk_size: int
    state_columns: int  # of V, for a program of the states kernel
    output_columns: int  # of V, for a program of the output kernel
    systems_warps: int = 4
    systems_registers: int | None = None
    states_warps: int = 4
    states_stages: int = 5  # half of them for the table that says where a chunk's rows are
    output_warps: int = 4
    output_stages: int = 2
    output_registers: int | None = None


def gdn_tiles(dtype: torch.dtype) -> GdnTiles:
    if dtype == torch.float32:
        # For exactness, not for speed: products of float32 run outside of the matrix units and live in registers.
        return GdnTiles(
            32, state_columns=16, output_columns=32, systems_warps=8, states_warps=8, states_stages=1, output_warps=8
        )
    # With so many registers three programs fit on a multiprocessor: worth more than the few words that are spilled.
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
    # A row of each input and a slot of the pool lie in one piece; rows and slots may lie apart.
    inputs = (("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("state pool", state_pool))
    for name, tensor in inputs:
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if len(v) == 0:
        return o
    tiles = tiles or gdn_tiles(v.dtype)
    table = segments.chunk_table(tiles.chunk_size)
    u, w, decay, to_end = _launch_systems(k, v, a, b, heads, table, tiles)
    start = _launch_states(k, u, w, decay, to_end, state_pool, table, tiles)
    _launch_outputs(q, k, u, decay, start, o, table, tiles)
    return o


def _launch_systems(
    k: Tensor, v: Tensor, a: Tensor, b: Tensor, heads: GdnHeads, table: ChunkTable, tiles: GdnTiles
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (Hk, K), (H, V) = k.shape[1:], v.shape[1:]
    num_chunks, Q = len(table.chunks_C4), tiles.chunk_size
    u, w = v.new_empty((num_chunks, H, V, Q)), v.new_empty((num_chunks, H, Q, K))
    decay, to_end = v.new_empty((2, num_chunks, H, Q), dtype=torch.float32)
    _gdn_systems_kernel[(H, num_chunks)](
        k,
        v,
        a,
        b,
        heads.A,
        heads.dt_bias,
        u,
        w,
        decay,
        to_end,
        table.chunks_C4,
        k.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        H=H,
        R=H // Hk,
        K=K,
        V=V,
        EPS=L2_NORM_EPS,
        Q=Q,
        BLOCK_K=systems_block(K, v.dtype),
        BLOCK_V=systems_block(V, v.dtype),
        EXACT=v.dtype == torch.float32,
        FETCH=v.itemsize == 2 and V % 8 == v.stride(0) % 8 == v.data_ptr() % 16 == 0,
        num_warps=tiles.systems_warps,
        maxnreg=tiles.systems_registers,
    )
    return u, w, decay, to_end


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


def systems_block(size: int, dtype: torch.dtype) -> int:
    """Columns of a tile of keys or values in the systems kernel.

    64 columns of two bytes fill a whole shared-memory swizzle, the one of the [Q, Q] tiles. With another one, ptxas
    of CUDA 12.8 takes the address of V's descriptors from a register that nobody wrote: wrong from row 16 on.
    """
    return max(dot_block(size), 16 if dtype == torch.float32 else 64)
