"""Kimi delta attention's decode steps of each sequence of a batch, from source slots to destination slots.

    S = diag(e^g) S;   S += k outer beta (v - S^T k);   o = S^T q

with q and k L2-normalised and q divided by sqrt(K) here.

Shapes    q, k, f [R, H, K]; v [R, H, V]; b [R, H]; heads: the parameters of g and beta; state_pool [S, H, K, V] float32
          or bfloat16, any stride over slots; dst_slots [B, T] int64, or [B] when T = 1; returns o [R, H, V] in v's
          dtype. B sequences of T rows (a token and its drafts) make R = B * T rows, a sequence's rows one after the
          other; row t's state goes to dst_slots[:, t]
Contract  f and b are as projected (headrace/kernels/kda/heads.py); destinations are unique; one may be its own
          sequence's source and no other's; every source is read before any slot is written; B = 0 is a no-op. In the
          Triton kernel a destination of -1, that of a captured graph's padding row, is written nowhere; slots are read
          early: an overlapped kernel (headrace/kernels/lib/pdl.py) must not have written them just before
Numerics  all arithmetic in float32; T rows at once equal T steps of one row, a bfloat16 pool's rounding after each row
          included
Source    Kimi Team 2025, "Kimi Linear", equation 1
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.rms_norm import L2_NORM_EPS, l2_normalize
from headrace.kernels.gdn.heads import log_decay
from headrace.kernels.gdn.tail_update import add_two
from headrace.kernels.gdn.tiles import access_bytes, launch_shape
from headrace.kernels.kda.heads import KdaHeads
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.segments import StateSource, steps_of_each
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def kda_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    heads: KdaHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    R, H, K = k.shape
    if not q.shape == k.shape == f.shape or v.shape[:2] != (R, H) or b.shape != (R, H):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, f {tuple(f.shape)}, b "
                         f"{tuple(b.shape)} disagree")  # fmt: skip
    if state_pool.shape[1:] != (H, K, v.shape[2]) or state_pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype} does not hold these states")
    implementation = kda_update_triton if runs_triton(v) else kda_update_torch
    return implementation(q, k, v, f, b, heads, state_pool, source, dst_slots)


def kda_update_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    heads: KdaHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    T = steps_of_each(dst_slots, len(v))
    state = source.read(state_pool).float()
    g, beta = heads.gates(f, b)
    outputs = []
    for t, dst in enumerate(dst_slots.view(-1, T).unbind(1)):
        outputs.append(_step(q[t::T], k[t::T], v[t::T], g[t::T], beta[t::T], state))
        rounded = state.to(state_pool.dtype)
        state_pool.index_copy_(0, dst, rounded)
        state = rounded.float()
    return outputs[0] if T == 1 else torch.stack(outputs, dim=1).flatten(0, 1)


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One row of each sequence: returns o, changes `state` [B, H, K, V]."""
    (batch, H, V), K = v.shape, k.shape[2]
    key_row = l2_normalize(k.float(), L2_NORM_EPS).reshape(-1, 1, K)
    query_row = l2_normalize(q.float(), L2_NORM_EPS).mul_(K**-0.5).reshape(-1, 1, K)
    state.mul_(torch.exp(g)[..., None])
    flat = state.view(batch * H, K, V)
    delta = (v.float().reshape(-1, 1, V) - torch.bmm(key_row, flat)) * beta.reshape(-1, 1, 1)
    flat.baddbmm_(key_row.transpose(1, 2), delta)
    return torch.bmm(query_row, flat).view(batch, H, V).to(v.dtype)


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _kda_update_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    f_ptr,
    b_ptr,
    A_ptr,
    bias_ptr,
    o_ptr,
    pool_ptr,
    src_ptr,
    dst_ptr,
    q_stride,  # the strides are those of rows, and of slots
    k_stride,
    v_stride,
    f_stride,
    b_stride,
    slot_stride,
    T: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PADDED_K: tl.constexpr,
    TILE_V: tl.constexpr,
    ACCESS: tl.constexpr,
    EPS: tl.constexpr,
):
    """A program holds TILE_V columns of a state in registers: read once, all together, and written once a step.

    With S decayed but not yet updated, o = S^T q + (k . q) delta, and norms are factors of sums. So no sum over keys,
    at which a program's warps wait for each other, depends on another one.
    """
    let_next_start()
    head = tl.program_id(0) // tl.cdiv(DV, TILE_V)
    column = tl.program_id(0) % tl.cdiv(DV, TILE_V) * TILE_V + tl.arange(0, TILE_V)
    key = tl.arange(0, PADDED_K)
    sequence = tl.program_id(1)
    in_k, in_v = key < DK, column < DV
    pool_ptr += head * DK * DV
    place = key[:, None] * DV + column[None, :]
    key_place = head * DK + key
    src = tl.load(src_ptr + sequence)
    destinations = ()  # type: tuple
    for t in tl.static_range(T):
        destinations += (tl.load(dst_ptr + sequence * T + t),)
    A, bias = tl.load(A_ptr + head), tl.load(bias_ptr + key_place, mask=in_k, other=0.0)
    wait_for_previous()

    found = (key < tl.where(src >= 0, DK, 0))[:, None] & in_v[None, :]
    state = tl.load(tl.multiple_of(pool_ptr + src * slot_stride, ACCESS) + place, mask=found, other=0.0)
    for t in tl.static_range(T):
        row = sequence * T + t
        k = tl.load(k_ptr + row * k_stride + key_place, mask=in_k, other=0.0)
        q = tl.load(q_ptr + row * q_stride + key_place, mask=in_k, other=0.0)
        f = tl.load(f_ptr + row * f_stride + key_place, mask=in_k, other=0.0)
        v = tl.load(v_ptr + row * v_stride + head * DV + column, mask=in_v, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(b_ptr + row * b_stride + head).to(tl.float32))
        k, q = k.to(tl.float32), q.to(tl.float32)
        kk, qq, kq = tl.reduce((k * k, q * q, k * q), 0, _add_three)
        decayed = state.to(tl.float32) * tl.exp(log_decay(f, bias, A))[:, None]
        state_k, state_q = tl.reduce((decayed * k[:, None], decayed * q[:, None]), 0, add_two)
        over_k = tl.rsqrt(kk + EPS)
        delta = beta * (v - state_k * over_k) * over_k
        o = (state_q + kq * delta) * (tl.rsqrt(qq + EPS) * DK**-0.5)
        tl.store(o_ptr + (row * H + head) * DV + column, o.to(o_ptr.dtype.element_ty), mask=in_v)
        state = (decayed + k[:, None] * delta[None, :]).to(pool_ptr.dtype.element_ty)
        dst = destinations[t]
        kept = (key < tl.where(dst >= 0, DK, 0))[:, None] & in_v[None, :]
        tl.store(tl.multiple_of(pool_ptr + dst * slot_stride, ACCESS) + place, state, mask=kept)


def kda_update_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    heads: KdaHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    T = steps_of_each(dst_slots, len(v))
    (R, H, DV), DK = v.shape, k.shape[2]
    # Each row of an input and each slot of the pool is contiguous; rows and slots may be apart.
    for name, tensor in (("q", q), ("k", k), ("v", v), ("f", f), ("b", b), ("state pool", state_pool)):
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
    o = torch.empty((R, H, DV), dtype=v.dtype, device=v.device)
    if R == 0:
        return o
    tile = launch_shape(R // T * H, state_pool.element_size())
    columns = min(tile.columns, next_power_of_2(DV))
    _kda_update_kernel[(H * cdiv(DV, columns), R // T)](
        q,
        k,
        v,
        f,
        b,
        heads.A,
        heads.dt_bias,
        o,
        state_pool,
        source.slots_N,
        dst_slots,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        f.stride(0),
        b.stride(0),
        state_pool.stride(0),
        T=T,
        H=H,
        DK=DK,
        DV=DV,
        PADDED_K=next_power_of_2(DK),
        TILE_V=columns,
        ACCESS=access_bytes(state_pool, tile.access_bytes),
        EPS=L2_NORM_EPS,
        num_warps=tile.num_warps,
        maxnreg=tile.registers if T == 1 else None,
        **OVERLAPPED,
    )
    return o
