"""Gated delta rule decode steps of each sequence of a batch, from source slots to destination slots.

    S = e^g S;   S += k outer beta (v - S^T k);   o = S^T q

with q and k L2-normalised and q divided by sqrt(Dk) here.

Shapes    q, k [R, Hk, Dk]; v [R, Hv, Dv]; a, b [R, Hv]; heads: the parameters of g; state_pool [S, Hv,
          Dk, Dv] float32 or bfloat16, any stride over slots; dst_slots [B, T] int64, or [B] when T = 1; returns
          o [R, Hv, Dv] in v's dtype. Value head h reads key head h // (Hv / Hk). B sequences of T rows (a token
          and its drafts) make R = B * T rows, a sequence's rows one after the other; row t's state goes to
          dst_slots[:, t]
Contract  a and b are as projected (headrace/kernels/gdn/heads.py); destinations are unique; one may be
          its own sequence's source and no other's; every source is read before any slot is written; B = 0 is a
          no-op. In the Triton kernel a destination of -1, that of a captured graph's padding row, is written
          nowhere; slots are read early: an overlapped kernel (headrace/kernels/lib/pdl.py) must not have written
          them just before
Numerics  all arithmetic in float32; T rows at once equal T steps of one row, a bfloat16 pool's rounding after
          each row included
Source    Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", equation 10
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.rms_norm import L2_NORM_EPS, l2_normalize
from headrace.kernels.gdn.heads import GdnHeads, log_decay
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.segments import StateSource, steps_of_each
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def gdn_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    heads: GdnHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    Hv, Dv = v.shape[1:]
    Hk, Dk = k.shape[1:]
    if q.shape != k.shape or Hv % Hk:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} disagree")
    if state_pool.shape[1:] != (Hv, Dk, Dv) or state_pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype} does not hold these states")
    implementation = gdn_update_triton if runs_triton(v) else gdn_update_torch
    return implementation(q, k, v, a, b, heads, state_pool, source, dst_slots)


def gdn_update_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    heads: GdnHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    T = steps_of_each(dst_slots, len(v))
    state = source.read(state_pool).float()
    g, beta = heads.gates(a, b)
    if T == 1:
        o = _step(q, k, v, g, beta, state)
        state_pool.index_copy_(0, dst_slots.flatten(), state.to(state_pool.dtype))
        return o
    outputs = []
    for t, dst in enumerate(dst_slots.unbind(1)):
        outputs.append(_step(q[t::T], k[t::T], v[t::T], g[t::T], beta[t::T], state))
        rounded = state.to(state_pool.dtype)
        state_pool.index_copy_(0, dst, rounded)
        state = rounded.float()
    return torch.stack(outputs, dim=1).flatten(0, 1)


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One row of each sequence: returns o, changes `state` [B, Hv, Dk, Dv]."""
    batch, Hv, Dv = v.shape
    Hk, Dk = k.shape[1:]
    k_BHK = l2_normalize(k.float(), L2_NORM_EPS)
    q_BHK = l2_normalize(q.float(), L2_NORM_EPS) * Dk**-0.5
    if Hv != Hk:
        k_BHK, q_BHK = k_BHK.repeat_interleave(Hv // Hk, dim=1), q_BHK.repeat_interleave(Hv // Hk, dim=1)
    key_row, query_row = k_BHK.reshape(-1, 1, Dk), q_BHK.reshape(-1, 1, Dk)
    state.mul_(torch.exp(g)[..., None, None])
    flat = state.view(batch * Hv, Dk, Dv)
    delta = (v.float().reshape(-1, 1, Dv) - torch.bmm(key_row, flat)) * beta.reshape(-1, 1, 1)
    flat.baddbmm_(key_row.transpose(1, 2), delta)
    o = torch.bmm(query_row, flat)
    return o.view(batch, Hv, Dv).to(v.dtype)


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _gdn_update_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
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
    a_stride,
    b_stride,
    slot_stride,
    T: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    HEADS_A_KEY: tl.constexpr,
    PADDED_K: tl.constexpr,
    TILE_V: tl.constexpr,
    ACCESS: tl.constexpr,
    EPS: tl.constexpr,
    BETA_SCALE: tl.constexpr,
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
    key_place = head // HEADS_A_KEY * DK + key
    src = tl.load(src_ptr + sequence)
    destinations = ()  # type: tuple
    for t in tl.static_range(T):
        destinations += (tl.load(dst_ptr + sequence * T + t),)
    wait_for_previous()

    found = (key < tl.where(src >= 0, DK, 0))[:, None] & in_v[None, :]
    state = tl.load(tl.multiple_of(pool_ptr + src * slot_stride, ACCESS) + place, mask=found, other=0.0)
    A, bias = tl.load(A_ptr + head), tl.load(bias_ptr + head)
    for t in tl.static_range(T):
        row = sequence * T + t
        k = tl.load(k_ptr + row * k_stride + key_place, mask=in_k, other=0.0)
        q = tl.load(q_ptr + row * q_stride + key_place, mask=in_k, other=0.0)
        v = tl.load(v_ptr + row * v_stride + head * DV + column, mask=in_v, other=0.0).to(tl.float32)
        decay = tl.exp(log_decay(tl.load(a_ptr + row * a_stride + head), bias, A))
        beta = BETA_SCALE * tl.sigmoid(tl.load(b_ptr + row * b_stride + head).to(tl.float32))
        k, q = k.to(tl.float32), q.to(tl.float32)
        kk, qq, kq = tl.reduce((k * k, q * q, k * q), 0, _add_three)
        wide = state.to(tl.float32)
        state_k, state_q = tl.reduce((wide * k[:, None], wide * q[:, None]), 0, _add_two)
        over_k = tl.rsqrt(kk + EPS)
        delta = beta * (v - state_k * (decay * over_k)) * over_k
        o = (state_q * decay + kq * delta) * (tl.rsqrt(qq + EPS) * DK**-0.5)
        tl.store(o_ptr + (row * H + head) * DV + column, o.to(o_ptr.dtype.element_ty), mask=in_v)
        state = (wide * decay + k[:, None] * delta[None, :]).to(pool_ptr.dtype.element_ty)
        dst = destinations[t]
        kept = (key < tl.where(dst >= 0, DK, 0))[:, None] & in_v[None, :]
        tl.store(tl.multiple_of(pool_ptr + dst * slot_stride, ACCESS) + place, state, mask=kept)


def gdn_update_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    heads: GdnHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    T = steps_of_each(dst_slots, len(v))
    R, Hv, Dv = v.shape
    Hk, Dk = k.shape[1:]
    # Each row of an input and each slot of the pool is contiguous; rows and slots may be apart.
    for name, tensor in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("state pool", state_pool)):
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
    o = torch.empty((R, Hv, Dv), dtype=v.dtype, device=v.device)
    if R == 0:
        return o
    tile = launch_shape(R // T * Hv, state_pool.element_size())
    columns = min(tile.columns, next_power_of_2(Dv))
    _gdn_update_kernel[(Hv * cdiv(Dv, columns), R // T)](
        q,
        k,
        v,
        a,
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
        a.stride(0),
        b.stride(0),
        state_pool.stride(0),
        T=T,
        H=Hv,
        DK=Dk,
        DV=Dv,
        HEADS_A_KEY=Hv // Hk,
        PADDED_K=next_power_of_2(Dk),
        TILE_V=columns,
        ACCESS=access_bytes(state_pool, tile.access_bytes),
        EPS=L2_NORM_EPS,
        BETA_SCALE=heads.beta_scale,
        num_warps=tile.num_warps,
        maxnreg=tile.registers if T == 1 else None,
        **OVERLAPPED,
    )
    return o


class GdnTile(NamedTuple):
    """A program's tile of a state, and its warps and registers."""

    columns: int  # of a state
    num_warps: int
    access_bytes: int  # at most, in one read or write of a thread
    registers: int | None = None  # the most of a thread, for one row a sequence: with drafts they would spill


def launch_shape(num_heads: int, element_bytes: int) -> GdnTile:
    """Tile for `num_heads` value heads in the whole batch: the fastest on an H200 at batches of 1, 16, 64 and 256 of 32
    heads (`bench.gpu_kernels_state --variants` of 58e2fd5). A small batch is cut finer to occupy all 132
    multiprocessors."""
    if num_heads < 256:
        return GdnTile(32, 2, 8) if element_bytes == 4 else GdnTile(16, 1, 8)
    return GdnTile(64, 4, 8, registers=128) if element_bytes == 4 else GdnTile(64, 4, 4)


def access_bytes(state_pool: Tensor, most: int) -> int:
    """Bytes of one access, which divide the address of every head's state. Narrow accesses give a thread more keys of
    fewer columns, and sums over keys that need fewer words from other threads."""
    element = state_pool.element_size()
    slot, head = (stride * element for stride in state_pool.stride()[:2])
    return math.gcd(most, state_pool.data_ptr(), slot, head)
