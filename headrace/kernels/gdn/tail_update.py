"""Gated delta rule decode steps of each sequence of a batch, over states at bases and tails of inputs.

    u_t = beta_t (v_t - e^g_t S_(t-1)^T k_t)      o_t = S_t^T q_t
    S_t = G(0, t) S + sum_j G(j, t) k_j outer u_j                            j: the tail's tokens up to t

with G(j, t) = exp(sum of g of the tokens behind j, up to t), S the state at the base, q and k L2-normalised, and q
divided by sqrt(Dk) here. So S is read once for all rows, and the tail's tokens only give dot products with k_t and q_t.

Shapes    q, k [R, Hk, Dk]; v [R, Hv, Dv]; a, b [R, Hv]; heads: the parameters of g; state_pool [S, Hv, Dk, Dv] float32
          or bfloat16, any stride over slots; tail: `GdnTail`; tails of T rows a sequence, R = B * T, a sequence's rows
          one after the other; returns o [R, Hv, Dv] in v's dtype. Value head h reads key head h // (Hv / Hk)
Contract  headrace/kernels/lib/tails.py; a and b are as projected (headrace/kernels/gdn/heads.py); B = 0 is a no-op. The
          Triton kernel reads fields early: an overlapped kernel (headrace/kernels/lib/pdl.py) must not have written
          them just before
Numerics  all arithmetic in float32, from inputs and u as they are stored; T rows at once equal T steps of one row
Source    Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", equation 10, unrolled from the base
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.rms_norm import L2_NORM_EPS
from headrace.kernels.gdn.heads import GdnHeads, log_decay
from headrace.kernels.gdn.tail_update_hopper import fits_hopper, gdn_tail_update_hopper
from headrace.kernels.gdn.tiles import access_bytes, launch_shape
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2
from headrace.kernels.lib.tail_programs import AT_ONCE, load_tail_fields
from headrace.kernels.lib.tails import Tails, most_kept


class GdnTail(NamedTuple):
    """Rings of one layer: k [rows, places, Hk, Dk], keys as they come, delta [rows, places, Hv, Dv], u divided by the
    key's length, both of a 16-bit dtype or float32, and log decays g [rows, places, Hv] float32."""

    k: Tensor
    delta: Tensor
    g: Tensor


def gdn_tail_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    heads: GdnHeads,
    state_pool: Tensor,
    tail: GdnTail,
    tails: Tails,
) -> Tensor:
    Hv, Dv = v.shape[1:]
    Hk, Dk = k.shape[1:]
    if q.shape != k.shape or Hv % Hk or len(v) != len(tails.fields) * tails.rows_each:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, {tails.rows_each} rows disagree")
    if state_pool.shape[1:] != (Hv, Dk, Dv) or state_pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype} does not hold these states")
    if tail.k.shape[2:] != (Hk, Dk) or tail.delta.shape[2:] != (Hv, Dv):
        raise ValueError(f"rings of k {tuple(tail.k.shape)} and u {tuple(tail.delta.shape)} do not hold these inputs")
    implementation = gdn_tail_update_triton if runs_triton(v) else gdn_tail_update_torch
    if fits_hopper(q, k, v, state_pool, tail, tails):
        implementation = gdn_tail_update_hopper
    return implementation(q, k, v, a, b, heads, state_pool, tail, tails)


def gdn_tail_update_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    heads: GdnHeads,
    state_pool: Tensor,
    tail: GdnTail,
    tails: Tails,
) -> Tensor:
    batch, T, (Hk, Dk), (Hv, Dv) = len(tails.fields), tails.rows_each, k.shape[1:], v.shape[1:]
    if batch == 0:
        return torch.empty_like(v)
    entries, heads_a_key = tails.entries, Hv // Hk
    g, beta = heads.gates(a, b)
    if T:
        entries.write(tail.k, k)
        entries.write(tail.g, g)
    k_BEHK, g_BEH = entries.read(tail.k).float(), entries.read(tail.g)
    state = tails.source.read(state_pool).float()
    o = v
    if T:
        of_state, of_entries = entries.decays(g_BEH)
        rows = torch.cat((k.view(batch, T, Hk, Dk), q.view(batch, T, Hk, Dk)), dim=1).float().transpose(1, 2)
        over = torch.rsqrt(rows.square().sum(-1) + L2_NORM_EPS).repeat_interleave(heads_a_key, dim=1)  # [B, Hv, 2 T]
        scores = torch.matmul(rows, k_BEHK.permute(0, 2, 3, 1))[:, :, None]  # [B, Hk, 1, 2 T, E]
        weights = of_entries.permute(0, 3, 1, 2).reshape(batch, Hk, heads_a_key, 1, T, -1) * scores.unflatten(3, (2, T))
        weights = weights.flatten(1, 2)  # [B, Hv, 2, T, E]
        # What keys and queries find in the state and the kept entries; then in those of the step's rows before them.
        found = torch.matmul(rows[:, :, None], state.unflatten(1, (Hk, -1))).view(batch, Hv, 2, T, Dv)
        found *= of_state.transpose(1, 2)[:, :, None, :, None]
        delta_BHEV = entries.read_kept(tail.delta).float().transpose(1, 2)
        found += torch.matmul(weights[..., : entries.num_kept].flatten(2, 3), delta_BHEV).view_as(found)
        own_weights = entries.own(weights.permute(0, 4, 1, 2, 3))  # [B, T, Hv, 2, T], of each row its entry's first
        v_BHTV, beta_BHT1 = v.float().view(batch, T, Hv, Dv).transpose(1, 2), beta.view(batch, T, Hv, 1).transpose(1, 2)
        new = []
        for t in range(T):
            over_k = over[:, :, t, None]
            u = (v_BHTV[:, :, t] - found[:, :, 0, t] * over_k) * beta_BHT1[:, :, t]
            new.append((u * over_k).to(tail.delta.dtype))
            found += own_weights[:, t, ..., None] * new[-1].float()[:, :, None, None]
        entries.write(tail.delta, torch.stack(new, dim=1).flatten(0, 1))
        o = (found[:, :, 1] * (over[:, :, T:, None] * Dk**-0.5)).transpose(1, 2).flatten(0, 1).to(v.dtype)
    if entries.written is not None:
        some = entries.written.sequences
        of_state, of_entries = entries.written.decays(g_BEH)
        keys = k_BEHK[some].permute(0, 2, 3, 1).repeat_interleave(heads_a_key, dim=1)
        weighted = entries.read(tail.delta)[some].float().transpose(1, 2) * of_entries.transpose(1, 2)[..., None]
        after = torch.addcmul(torch.matmul(keys, weighted), state[some], of_state[..., None, None])
        entries.written.write(state_pool, after)
    return o


@triton.jit
def add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit(do_not_specialize_on_alignment=["fields_ptr"])
def _gdn_tail_update_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_ptr,
    bias_ptr,
    o_ptr,
    pool_ptr,
    k_tail_ptr,
    delta_tail_ptr,
    g_tail_ptr,
    fields_ptr,
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
    PLACES: tl.constexpr,
    KEPT: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_T: tl.constexpr,
    TILE_V: tl.constexpr,
    ACCESS: tl.constexpr,
    EPS: tl.constexpr,
    BETA_SCALE: tl.constexpr,
):
    """A program holds TILE_V columns of a state in registers, and the entries of up to KEPT tokens, a power of two."""
    let_next_start()
    head = tl.program_id(0) // tl.cdiv(DV, TILE_V)
    column = tl.program_id(0) % tl.cdiv(DV, TILE_V) * TILE_V + tl.arange(0, TILE_V)
    key = tl.arange(0, PADDED_K)
    sequence = tl.program_id(1)
    in_k, in_v = key < DK, column < DV
    key_head = head // HEADS_A_KEY
    HK: tl.constexpr = H // HEADS_A_KEY
    pool_ptr += head * DK * DV
    place = key[:, None] * DV + column[None, :]
    src, dst, row, start, kept, written = load_tail_fields(fields_ptr, sequence)
    kept = tl.where(row >= 0, kept, 0)
    token = tl.arange(0, KEPT)
    is_kept = token < kept
    ring = row.to(tl.int64) * PLACES + (start + token) % PLACES
    A, bias = tl.load(A_ptr + head), tl.load(bias_ptr + head)
    wait_for_previous()

    found = (key < tl.where((src >= 0) & (row >= 0), DK, 0))[:, None] & in_v[None, :]
    source_ptr = tl.multiple_of(pool_ptr + src.to(tl.int64) * slot_stride, ACCESS)
    state = tl.load(source_ptr + place, mask=found, other=0.0).to(tl.float32)
    in_k_kept, in_v_kept = is_kept[:, None] & in_k[None, :], in_v[:, None] & is_kept[None, :]
    k_kept_ptr = k_tail_ptr + (ring * HK + key_head)[:, None] * DK + key[None, :]
    # [TILE_V, KEPT]: sums over entries run along rows, because those over a state's keys run along columns. With both
    # along columns, Triton 3.6 moves the change from one sum's layout to the other's up to the load of a bfloat16
    # state, and a thread holds the state twice: 984 bytes a thread spilled, 4376 with drafts.
    delta_kept_ptr = delta_tail_ptr + column[:, None] + (ring * H + head)[None, :] * DV
    k_kept = tl.load(k_kept_ptr, mask=in_k_kept, other=0.0).to(tl.float32)
    delta_kept = tl.load(delta_kept_ptr, mask=in_v_kept, other=0.0).to(tl.float32)
    g_kept = tl.load(g_tail_ptr + ring * H + head, mask=is_kept, other=0.0)
    upto_kept = tl.cumsum(g_kept, 0)
    log_kept = tl.sum(g_kept, 0)  # decay of all kept tokens

    t = tl.arange(0, PADDED_T)
    is_new = t < T
    new = sequence * T + t
    k_new_ptr = k_ptr + new[:, None] * k_stride + key_head * DK + key[None, :]
    k_new = tl.load(k_new_ptr, mask=is_new[:, None] & in_k[None, :], other=0.0).to(tl.float32)
    g_new = tl.where(is_new, log_decay(tl.load(a_ptr + new * a_stride + head, mask=is_new, other=0.0), bias, A), 0.0)
    upto_new = tl.cumsum(g_new, 0)
    delta_new = tl.zeros([TILE_V, PADDED_T], tl.float32)
    for i in tl.static_range(T):
        r = sequence * T + i
        k = tl.load(k_ptr + r * k_stride + key_head * DK + key, mask=in_k, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + r * q_stride + key_head * DK + key, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + r * v_stride + head * DV + column, mask=in_v, other=0.0).to(tl.float32)
        beta = BETA_SCALE * tl.sigmoid(tl.load(b_ptr + r * b_stride + head).to(tl.float32))
        over_k = tl.rsqrt(tl.sum(k * k, 0) + EPS)
        over_q = tl.rsqrt(tl.sum(q * q, 0) + EPS) * DK**-0.5
        state_k, state_q = tl.reduce((state * k[:, None], state * q[:, None]), 0, add_two)
        kept_k, kept_q = tl.reduce((k_kept * k[None, :], k_kept * q[None, :]), 1, add_two)
        new_k, new_q = tl.reduce((k_new * k[None, :], k_new * q[None, :]), 1, add_two)
        at = tl.sum(tl.where(t == i, upto_new, 0.0), 0)
        decay, of_kept = tl.exp(log_kept + at), tl.exp(log_kept + at - upto_kept)
        of_new = tl.where(t <= i, tl.exp(at - upto_new), 0.0)
        known = state_k * decay + tl.sum(delta_kept * (kept_k * of_kept)[None, :], 1)
        known += tl.sum(delta_new * (new_k * of_new)[None, :], 1)
        delta = (v - known * over_k) * beta * over_k
        delta = delta.to(delta_tail_ptr.dtype.element_ty).to(tl.float32)
        delta_new = tl.where((t == i)[None, :], delta[:, None], delta_new)
        o = state_q * decay + tl.sum(delta_kept * (kept_q * of_kept)[None, :], 1)
        o += tl.sum(delta_new * (new_q * of_new)[None, :], 1)
        tl.store(o_ptr + (r * H + head) * DV + column, (o * over_q).to(o_ptr.dtype.element_ty), mask=in_v)

    if T > 0:
        new_ring = row.to(tl.int64) * PLACES + (start + kept + t) % PLACES
        is_added = t < tl.where(row >= 0, T, 0)
        delta_place = column[:, None] + (new_ring * H + head)[None, :] * DV
        in_delta = in_v[:, None] & is_added[None, :]
        tl.store(delta_tail_ptr + delta_place, delta_new.to(delta_tail_ptr.dtype.element_ty), mask=in_delta)
        if tl.program_id(0) % tl.cdiv(DV, TILE_V) == 0:
            tl.store(g_tail_ptr + new_ring * H + head, g_new, mask=is_added)
            if head % HEADS_A_KEY == 0:
                k_place = (new_ring * HK + key_head)[:, None] * DK + key[None, :]
                in_key = is_added[:, None] & in_k[None, :]
                tl.store(k_tail_ptr + k_place, k_new.to(k_tail_ptr.dtype.element_ty), mask=in_key)

    if (dst >= 0) & (row >= 0):
        num_new = written - kept  # of the step's tokens; below zero: not even all kept ones
        at = tl.sum(tl.where(token < written, g_kept, 0.0), 0) + tl.sum(tl.where(t < num_new, g_new, 0.0), 0)
        of_kept = tl.where(token < written, tl.exp(at - upto_kept), 0.0)
        of_new = tl.where(t < num_new, tl.exp(at - log_kept - upto_new), 0.0)
        state *= tl.exp(at)
        # Read again, a few at a time: held as a product of matrices they would take all registers, in each step.
        for first in range(0, tl.minimum(written, kept), AT_ONCE):
            for more in tl.static_range(AT_ONCE):
                j = first + more
                entry = row.to(tl.int64) * PLACES + (start + j) % PLACES
                limit = tl.where(j < kept, 1, 0)
                k_ptr_j = k_tail_ptr + (entry * HK + key_head) * DK + key
                delta_ptr_j = delta_tail_ptr + (entry * H + head) * DV + column
                k = tl.load(k_ptr_j, mask=key < DK * limit, other=0.0).to(tl.float32)
                delta = tl.load(delta_ptr_j, mask=column < DV * limit, other=0.0).to(tl.float32)
                state += k[:, None] * (delta * tl.sum(tl.where(token == j, of_kept, 0.0), 0))[None, :]
        for i in tl.static_range(T):
            k = tl.load(k_ptr + (sequence * T + i) * k_stride + key_head * DK + key, mask=in_k, other=0.0).to(
                tl.float32
            )
            delta = tl.sum(tl.where((t == i)[None, :], delta_new * of_new[None, :], 0.0), 1)
            state += k[:, None] * delta[None, :]
        target_ptr = tl.multiple_of(pool_ptr + dst.to(tl.int64) * slot_stride, ACCESS)
        tl.store(target_ptr + place, state.to(pool_ptr.dtype.element_ty), mask=in_k[:, None] & in_v[None, :])


def gdn_tail_update_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    heads: GdnHeads,
    state_pool: Tensor,
    tail: GdnTail,
    tails: Tails,
) -> Tensor:
    (R, Hv, Dv), (Hk, Dk), batch = v.shape, k.shape[1:], len(tails.fields)
    # Each row of an input and each slot of the pool is contiguous; rows and slots may be apart.
    for name, tensor in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("state pool", state_pool)):
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
    o = torch.empty((R, Hv, Dv), dtype=v.dtype, device=v.device)
    if batch == 0:
        return o
    tile = launch_shape(batch * Hv, state_pool.element_size())
    columns = min(tile.columns, next_power_of_2(Dv))
    _gdn_tail_update_kernel[(Hv * cdiv(Dv, columns), batch)](
        q,
        k,
        v,
        a,
        b,
        heads.A,
        heads.dt_bias,
        o,
        state_pool,
        *tail,
        tails.fields,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        state_pool.stride(0),
        T=tails.rows_each,
        H=Hv,
        DK=Dk,
        DV=Dv,
        HEADS_A_KEY=Hv // Hk,
        PLACES=tail.k.shape[1],
        KEPT=next_power_of_2(most_kept(tail.k.shape[1])),
        PADDED_K=next_power_of_2(Dk),
        PADDED_T=next_power_of_2(max(1, tails.rows_each)),
        TILE_V=columns,
        ACCESS=access_bytes(state_pool, tile.access_bytes),
        EPS=L2_NORM_EPS,
        BETA_SCALE=heads.beta_scale,
        num_warps=tile.num_warps,
        **OVERLAPPED,
    )
    return o
