"""Norm, rotary embedding and cache write of a projection's queries, keys and values, in one pass.

    q, k = rotate(rms_norm(q, k));  k_pool[block, offset] = k;  v_pool[block, offset] = v

Shapes    projected [T, >= (H + 2 Hkv) D], any stride over rows: queries, keys, values, in this order; norm_JD
          [H + Hkv, D] or None; rotary: cos and sin [T, 1, R], 2R <= D, or None; k_pool, v_pool [P, bs, Hkv, D], of
          the same strides; block_T, offset_T [T]. Returns q [T, H, D], k, v [T, Hkv, D]
Contract  (block, offset) pairs are unique. The results may be views of `projected`. Triton reads the pairs early:
          an overlapped kernel (headrace/kernels/lib/pdl.py) must not have written them just before
Numerics  float32 inside, rounded once (torch: after the norm, too)
Source    the reference composes headrace/kernels/dense/rms_norm.py, rotary.py and `store_kv`
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.paged_attention import store_kv
from headrace.kernels.attention.rotary import rotate_
from headrace.kernels.dense.rms_norm import rms_norm
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

Rotary = tuple[Tensor, Tensor]


def prepare_qkv(
    projected: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_T: Tensor,
    offset_T: Tensor,
    num_heads: int,
    norm_JD: Tensor | None,
    eps: float,
    rotary: Rotary | None,
) -> tuple[Tensor, Tensor, Tensor]:
    T, D, J = len(projected), k_pool.shape[3], num_heads + k_pool.shape[2]
    if projected.shape[1] < (J + k_pool.shape[2]) * D or projected.dtype != k_pool.dtype:
        raise ValueError(f"projected {tuple(projected.shape)} {projected.dtype} does not fit {num_heads} heads and the "
                         f"pool {tuple(k_pool.shape)} {k_pool.dtype}")  # fmt: skip
    if norm_JD is not None and norm_JD.shape != (J, D):
        raise ValueError(f"norm {tuple(norm_JD.shape)} is not {(J, D)}")
    if rotary is not None and (len(rotary[0]) != T or 2 * rotary[0].shape[-1] > D):
        raise ValueError(f"cos {tuple(rotary[0].shape)} does not fit {T} rows of head dim {D}")
    prepare = prepare_qkv_triton if runs_triton(projected) else prepare_qkv_torch
    return prepare(projected, k_pool, v_pool, block_T, offset_T, num_heads, norm_JD, eps, rotary)


def prepare_qkv_torch(
    projected: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_T: Tensor,
    offset_T: Tensor,
    num_heads: int,
    norm_JD: Tensor | None,
    eps: float,
    rotary: Rotary | None,
) -> tuple[Tensor, Tensor, Tensor]:
    qk_TJD, v = _split(projected, num_heads, k_pool)
    if norm_JD is not None:
        qk_TJD = rms_norm(qk_TJD, norm_JD, eps)
    if rotary is not None:
        rotate_(qk_TJD, *rotary)
    q, k = qk_TJD[:, :num_heads], qk_TJD[:, num_heads:]
    store_kv(k, v, k_pool, v_pool, block_T, offset_T)
    return q, k, v


def _split(projected: Tensor, num_heads: int, k_pool: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, J, D], values [T, Hkv, D], as views."""
    T, num_kv, D = len(projected), k_pool.shape[2], k_pool.shape[3]
    J = num_heads + num_kv
    return projected[:, : J * D].view(T, J, D), projected[:, J * D : (J + num_kv) * D].view(T, num_kv, D)


@triton.jit
def _prepare_kernel(
    x_ptr, out_ptr, k_pool_ptr, v_pool_ptr, block_ptr, offset_ptr, norm_ptr, cos_ptr, sin_ptr,
    stride_x, stride_block, stride_token, eps,
    FIRST_HEAD: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_HEADS heads of one row; heads 0..H are queries, then HKV keys, then HKV values."""
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    head = (FIRST_HEAD + tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    is_here = (head < H + 2 * HKV) & (d < D)
    is_qk = is_here & (head < H + HKV)
    place = tl.load(block_ptr + row).to(tl.int64) * stride_block + tl.load(offset_ptr + row) * stride_token
    if HAS_NORM:
        norm = tl.load(norm_ptr + head * D + d, mask=is_qk, other=0.0)
    wait_for_previous()

    x_ptr += row * stride_x
    x = tl.load(x_ptr + head * D + d, mask=is_here, other=0.0)
    y = x.to(tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
        y = tl.where(is_qk, y * inverse * norm, y)
    if R > 0:
        is_turned = is_qk & (d < 2 * R)
        partner = tl.where(d < R, d + R, d - R)
        other = tl.load(x_ptr + head * D + partner, mask=is_turned, other=0.0).to(tl.float32)
        if HAS_NORM:
            other *= inverse * tl.load(norm_ptr + head * D + partner, mask=is_turned, other=0.0)
        cos = tl.load(cos_ptr + row * R + d % R, mask=d < 2 * R, other=0.0)
        sin = tl.load(sin_ptr + row * R + d % R, mask=d < 2 * R, other=0.0)
        y = tl.where(is_turned, y * cos + tl.where(d < R, -other, other) * sin, y)
    y = y.to(x.dtype)
    if HAS_NORM or R > 0:
        tl.store(out_ptr + row * ((H + HKV) * D) + head * D + d, y, mask=is_qk)
    tl.store(k_pool_ptr + place + (head - H) * D + d, y, mask=is_qk & (head >= H))
    tl.store(v_pool_ptr + place + (head - H - HKV) * D + d, y, mask=is_here & (head >= H + HKV))


def prepare_qkv_triton(
    projected: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_T: Tensor,
    offset_T: Tensor,
    num_heads: int,
    norm_JD: Tensor | None,
    eps: float,
    rotary: Rotary | None,
) -> tuple[Tensor, Tensor, Tensor]:
    qk_TJD, v = _split(projected, num_heads, k_pool)
    T, J, D = qk_TJD.shape
    num_kv = v.shape[1]
    if projected.stride(1) != 1 or k_pool.stride() != v_pool.stride() or k_pool.stride()[2:] != (D, 1):
        raise ValueError(f"strides {projected.stride()}, {k_pool.stride()}, {v_pool.stride()} are not handled")
    is_changed = norm_JD is not None or rotary is not None
    out = torch.empty((T, J, D), dtype=projected.dtype, device=projected.device) if is_changed else qk_TJD
    cos, sin = (table.contiguous() for table in rotary) if rotary is not None else (None, None)
    first_head = 0 if is_changed else num_heads  # unchanged queries are not touched
    block_d = next_power_of_2(D)
    block_heads = min(next_power_of_2(J + num_kv - first_head), max(1, 2048 // block_d))
    if T:
        _prepare_kernel[(T, cdiv(J + num_kv - first_head, block_heads))](
            projected, out, k_pool, v_pool, block_T, offset_T, norm_JD, cos, sin,
            projected.stride(0), k_pool.stride(0), k_pool.stride(1), eps,
            FIRST_HEAD=first_head, H=num_heads, HKV=num_kv, D=D, R=0 if cos is None else cos.shape[-1],
            HAS_NORM=norm_JD is not None, BLOCK_HEADS=block_heads, BLOCK_D=block_d, num_warps=4, **OVERLAPPED,
        )  # fmt: skip
    return out[:, :num_heads], out[:, num_heads:], v
