"""Triangular systems of the gated delta rule's scan: u and w of each chunk, and the decays for its other kernels.

    (I + A) [u, w] = [beta v, beta e^decay k]        A_ij = beta_i e^(decay_i - decay_j) k_i . k_j  for i > j, or 0

with k L2-normalised here and decay the sum of g since the chunk's start. I + A is inverted, by blocks, in the matrix
units: a substitution would go row by row.

Shapes    k [T, Hk, K]; v [T, H, V]; a, b [T, H]; returns u [C, H, V, Q] and w [C, H, Q, K] in v's dtype, and in float32
          decay [C, H, Q], log2 of the decay since the chunk's start, whose last entry is the chunk's whole decay, and
          to_end [C, H, Q], the decay from each row to the chunk's end over its key's norm
Contract  each row of an input is contiguous; Q is a power of two, 16 to 128; in a chunk's padding rows all results
          are zero but the decay, which stays the whole one; for unused entries of the table nothing is written
Numerics  sums, decays, norms and the inverse in float32; factors of products in v's dtype, while inverting in float16
          where v is not float32: see `headrace.kernels.gdn.prefill`
Source    Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", section 3.3 (WY form)

Legend    C chunks, Q rows a chunk, R = H / Hk
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.rms_norm import L2_NORM_EPS
from headrace.kernels.gdn.heads import GdnHeads, log_decay
from headrace.kernels.lib.chunks import ChunkTable
from headrace.kernels.lib.dot import dot, swizzle_block
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.pdl import fetch


@triton.jit
def inverse_of_unit_lower(system, Q: tl.constexpr, EXACT: tl.constexpr):
    """(I + system)^-1 for a strictly lower triangular system [Q, Q], Q a power of two.

    Inverses X, Y of two neighbouring diagonal blocks give that of both with the block A below X: [[X, 0], [-Y A X, Y]].
    All pairs of one size at once, sizes 1, 2, 4, ... Q / 2. Y A is the product of all known inverses and the whole
    system, of which only the blocks A are kept: so the system is converted to an operand once.
    """
    apart = tl.arange(0, Q)[:, None] ^ tl.arange(0, Q)[None, :]  # the highest bit is the level at which two rows meet
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
    BETA_SCALE: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EXACT: tl.constexpr,
    FETCH: tl.constexpr,
):
    """One chunk for one value head."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    row, key, value = tl.arange(0, Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    if num_rows < 0:
        return
    inside = row < num_rows
    packed = first_row + row
    if FETCH:  # values are needed last, and registers hold them no earlier
        fetch(v_ptr + tl.where(inside, packed, 0) * v_stride + head * V, V * 2)
    a = tl.load(a_ptr + packed * a_stride + head, mask=inside, other=0.0)
    b = tl.load(b_ptr + packed * b_stride + head, mask=inside, other=0.0)
    g = tl.where(inside, log_decay(a, tl.load(bias_ptr + head), tl.load(A_ptr + head)), 0.0)
    beta = tl.where(inside, BETA_SCALE * tl.sigmoid(b.to(tl.float32)), 0.0)
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
    inverse = inverse_of_unit_lower(tl.where(row[:, None] > row[None, :], system, 0.0), Q, EXACT)

    tile = tl.cast(chunk_rows, tl.int64)
    w = dot((inverse * (beta * over_norm * tl.exp2(decay))[None, :]).to(k.dtype), k)
    w_place = w_ptr + tile * K + row[:, None] * K + key[None, :]
    tl.store(w_place, w.to(w_ptr.dtype.element_ty), mask=(key < K)[None, :])
    in_v = inside[:, None] & (value < V)[None, :]
    v = tl.load(v_ptr + packed[:, None] * v_stride + (head * V + value)[None, :], mask=in_v, other=0.0)
    u = dot((inverse * beta[None, :]).to(v.dtype), v)
    u_place = u_ptr + tile * V + row[:, None] + value[None, :] * Q
    tl.store(u_place, u.to(u_ptr.dtype.element_ty), mask=(value < V)[None, :])


def launch_systems(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    heads: GdnHeads,
    table: ChunkTable,
    chunk_size: int,
    num_warps: int,
    registers: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u, w, decay and to_end. `registers`: the most that a thread may take."""
    (Hk, K), (H, V) = k.shape[1:], v.shape[1:]
    num_chunks, Q = len(table.chunks_C4), chunk_size
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
        BETA_SCALE=heads.beta_scale,
        Q=Q,
        BLOCK_K=swizzle_block(K, v.dtype),
        BLOCK_V=swizzle_block(V, v.dtype),
        EXACT=v.dtype == torch.float32,
        FETCH=v.itemsize == 2 and V % 8 == v.stride(0) % 8 == v.data_ptr() % 16 == 0,
        num_warps=num_warps,
        maxnreg=registers,
    )
    return u, w, decay, to_end
