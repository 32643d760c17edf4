"""Mamba2 (SSD) decode steps of each sequence of a batch, over states at bases and tails of inputs.

    y_t = G(0, t) S C_t + sum_j G(j, t) (B_j . C_t) dt_j x_j + D * x_t        j: the tail's tokens up to t
    S_w = G(0, w) S + sum_j G(j, w) dt_j x_j outer B_j                        the state that is written, j up to w

with G(j, t) = exp(sum of dt A of the tokens behind j, up to t), and S the state at the base.

Shapes    x [R, H, P]; dt [R, H]; B, C [R, G, N]; heads: A, D and the parameters of dt; state_pool [S, H, P, N] float32
          or bfloat16, any stride over slots; tail: `SsdTail`; tails of T rows a sequence, R = B * T, a sequence's rows
          one after the other; returns y [R, H, P] in x's dtype
Contract  headrace/kernels/lib/tails.py; dt is raw, as projected (headrace/kernels/ssd/heads.py); B = 0 is a no-op. The
          Triton kernel reads fields early: an overlapped kernel (headrace/kernels/lib/pdl.py) must not have written
          them just before
Numerics  all arithmetic in float32, from inputs as they are stored; T rows at once equal T steps of one row
Source    Dao & Gu 2024, "Transformers are SSMs" (recurrent form, unrolled from the base)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2
from headrace.kernels.lib.tail_programs import AT_ONCE, load_tail_fields
from headrace.kernels.lib.tails import Tails, most_kept
from headrace.kernels.ssd.heads import SsdHeads, time_step
from headrace.kernels.ssd.tail_update_hopper import fits_hopper, ssd_tail_update_hopper


class SsdTail(NamedTuple):
    """Rings of one layer: x [rows, places, H, P] and B [rows, places, G, N] of a 16-bit dtype or float32, and the time
    steps dt [rows, places, H] float32."""

    x: Tensor
    B: Tensor
    dt: Tensor


def ssd_tail_update(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    heads: SsdHeads,
    state_pool: Tensor,
    tail: SsdTail,
    tails: Tails,
) -> Tensor:
    H, P = x.shape[1:]
    if H % B.shape[1] or B.shape != C.shape or len(x) != len(tails.fields) * tails.rows_each:
        raise ValueError(f"x {tuple(x.shape)}, B {tuple(B.shape)}, C {tuple(C.shape)}, {tails.rows_each} rows disagree")
    if state_pool.shape[1:] != (H, P, B.shape[2]) or state_pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype} does not hold these states")
    if tail.x.shape[2:] != (H, P) or tail.B.shape[2:] != B.shape[1:]:
        raise ValueError(f"rings of x {tuple(tail.x.shape)} and B {tuple(tail.B.shape)} do not hold these inputs")
    implementation = ssd_tail_update_triton if runs_triton(x) else ssd_tail_update_torch
    if fits_hopper(x, B, C, state_pool, tail, tails):
        implementation = ssd_tail_update_hopper
    return implementation(x, dt, B, C, heads, state_pool, tail, tails)


def ssd_tail_update_torch(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    heads: SsdHeads,
    state_pool: Tensor,
    tail: SsdTail,
    tails: Tails,
) -> Tensor:
    batch, T, (H, P), (G, N) = len(tails.fields), tails.rows_each, x.shape[1:], B.shape[1:]
    if batch == 0:
        return torch.empty_like(x)
    entries = tails.entries
    if T:
        for ring, new in zip(tail, (x, B, heads.time_steps(dt)), strict=True):
            entries.write(ring, new)
    x_BEHP, B_BEGN, dt_BEH = (entries.read(ring).float() for ring in tail)
    log_decay = dt_BEH * heads.A
    state = tails.source.read(state_pool).float()
    y = x
    if T:
        of_state, of_entries = entries.decays(log_decay)
        C_BGNT = C.float().view(batch, T, G, N).permute(0, 2, 3, 1)
        # Heads of a group share B and C: one product a group instead of a head.
        from_state = torch.bmm(state.view(batch * G, -1, N), C_BGNT.reshape(batch * G, N, T)).view(batch, H, P, T)
        scores_BGET = torch.matmul(B_BEGN.transpose(1, 2), C_BGNT)
        weights_BHET = (of_entries * dt_BEH[:, None]).permute(0, 3, 2, 1)
        weights_BHET = (weights_BHET.unflatten(1, (G, -1)) * scores_BGET[:, :, None]).flatten(1, 2)
        from_entries = torch.matmul(x_BEHP.permute(0, 2, 3, 1), weights_BHET)
        y_BHPT = torch.addcmul(from_entries, from_state, of_state.transpose(1, 2)[:, :, None])
        y = y_BHPT.permute(0, 3, 1, 2).reshape(batch * T, H, P).addcmul(x.float(), heads.D[:, None]).to(x.dtype)
    if entries.written is not None:
        some = entries.written.sequences
        of_state, of_entries = entries.written.decays(log_decay)
        weighted = x_BEHP[some] * (of_entries * dt_BEH[some])[..., None]
        weighted_WGPE = weighted.view(len(some), entries.num, G, -1).permute(0, 2, 3, 1)
        added = torch.matmul(weighted_WGPE, B_BEGN[some].transpose(1, 2)).view(-1, H, P, N)
        entries.written.write(state_pool, torch.addcmul(added, state[some], of_state[..., None, None]))
    return y


@triton.jit
def _ssd_tail_update_kernel(
    x_ptr,
    dt_ptr,
    B_ptr,
    C_ptr,
    A_ptr,
    D_ptr,
    bias_ptr,
    y_ptr,
    pool_ptr,
    x_tail_ptr,
    B_tail_ptr,
    dt_tail_ptr,
    fields_ptr,
    x_stride,  # the strides are those of rows, and of slots
    dt_stride,
    B_stride,
    C_stride,
    slot_stride,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
    T: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    KEPT: tl.constexpr,
    TILE_P: tl.constexpr,
    PADDED_N: tl.constexpr,
    PADDED_T: tl.constexpr,
):
    """A program holds TILE_P rows of one head's state in registers, and the entries of up to KEPT tokens, a power of
    two."""
    let_next_start()
    head = tl.program_id(0) // tl.cdiv(P, TILE_P)
    p = tl.program_id(0) % tl.cdiv(P, TILE_P) * TILE_P + tl.arange(0, TILE_P)
    n = tl.arange(0, PADDED_N)
    sequence = tl.program_id(1)
    in_p, in_n = p < P, n < N
    group = head // HEADS_A_GROUP
    place = head * P * N + p[:, None] * N + n[None, :]
    A = tl.load(A_ptr + head)
    D = tl.load(D_ptr + head)
    bias = tl.load(bias_ptr + head)
    src, dst, row, start, kept, written = load_tail_fields(fields_ptr, sequence)
    kept = tl.where(row >= 0, kept, 0)
    token = tl.arange(0, KEPT)
    is_kept = token < kept
    ring = row.to(tl.int64) * PLACES + (start + token) % PLACES
    G: tl.constexpr = H // HEADS_A_GROUP
    wait_for_previous()

    found = (p < tl.where((src >= 0) & (row >= 0), P, 0))[:, None] & in_n[None, :]
    state = tl.load(pool_ptr + src.to(tl.int64) * slot_stride + place, mask=found, other=0.0).to(tl.float32)
    x_kept = tl.load(
        x_tail_ptr + (ring * H + head)[:, None] * P + p[None, :], mask=is_kept[:, None] & in_p[None, :], other=0.0
    ).to(tl.float32)
    B_kept = tl.load(
        B_tail_ptr + (ring * G + group)[:, None] * N + n[None, :], mask=is_kept[:, None] & in_n[None, :], other=0.0
    ).to(tl.float32)
    dt_kept = tl.load(dt_tail_ptr + ring * H + head, mask=is_kept, other=0.0)
    upto_kept = tl.cumsum(dt_kept * A, 0)
    log_kept = tl.sum(dt_kept * A, 0)  # decay of all kept tokens

    t = tl.arange(0, PADDED_T)
    is_new = t < T
    new = sequence * T + t
    raw = tl.load(dt_ptr + new * dt_stride + head, mask=is_new, other=0.0)
    dt_new = tl.where(is_new, time_step(raw, bias, DT_MIN, DT_MAX), 0.0)
    upto_new = tl.cumsum(dt_new * A, 0)
    x_new = tl.load(
        x_ptr + new[:, None] * x_stride + head * P + p[None, :], mask=is_new[:, None] & in_p[None, :], other=0.0
    ).to(tl.float32)
    B_new = tl.load(
        B_ptr + new[:, None] * B_stride + group * N + n[None, :], mask=is_new[:, None] & in_n[None, :], other=0.0
    ).to(tl.float32)
    for i in tl.static_range(T):
        C = tl.load(C_ptr + (sequence * T + i) * C_stride + group * N + n, mask=in_n, other=0.0).to(tl.float32)
        at = tl.sum(tl.where(t == i, upto_new, 0.0), 0)
        x = tl.sum(tl.where((t == i)[:, None], x_new, 0.0), 0)
        of_kept = tl.sum(B_kept * C[None, :], 1) * dt_kept * tl.exp(log_kept + at - upto_kept)
        of_new = tl.where(t <= i, tl.sum(B_new * C[None, :], 1) * dt_new * tl.exp(at - upto_new), 0.0)
        y = tl.sum(state * C[None, :], 1) * tl.exp(log_kept + at) + D * x
        y += tl.sum(of_kept[:, None] * x_kept, 0) + tl.sum(of_new[:, None] * x_new, 0)
        tl.store(y_ptr + ((sequence * T + i) * H + head) * P + p, y.to(y_ptr.dtype.element_ty), mask=in_p)

    if T > 0:
        new_ring = row.to(tl.int64) * PLACES + (start + kept + t) % PLACES
        is_added = t < tl.where(row >= 0, T, 0)
        x_place = (new_ring * H + head)[:, None] * P + p[None, :]
        tl.store(x_tail_ptr + x_place, x_new.to(x_tail_ptr.dtype.element_ty), mask=is_added[:, None] & in_p[None, :])
        if tl.program_id(0) % tl.cdiv(P, TILE_P) == 0:
            tl.store(dt_tail_ptr + new_ring * H + head, dt_new, mask=is_added)
            if head % HEADS_A_GROUP == 0:
                B_place = (new_ring * G + group)[:, None] * N + n[None, :]
                in_B = is_added[:, None] & in_n[None, :]
                tl.store(B_tail_ptr + B_place, B_new.to(B_tail_ptr.dtype.element_ty), mask=in_B)

    if (dst >= 0) & (row >= 0):
        num_new = written - kept  # of the step's tokens; below zero: not even all kept ones
        at = tl.sum(tl.where(token < written, dt_kept * A, 0.0), 0) + tl.sum(tl.where(t < num_new, dt_new * A, 0.0), 0)
        of_kept = tl.where(token < written, dt_kept * tl.exp(at - upto_kept), 0.0)
        of_new = tl.where(t < num_new, dt_new * tl.exp(at - log_kept - upto_new), 0.0)
        state *= tl.exp(at)
        # Read again, a few at a time: held as a product of matrices they would take all registers, in each step.
        for first in range(0, tl.minimum(written, kept), AT_ONCE):
            for more in tl.static_range(AT_ONCE):
                j = first + more
                entry = row.to(tl.int64) * PLACES + (start + j) % PLACES
                limit = tl.where(j < kept, 1, 0)
                x = tl.load(x_tail_ptr + (entry * H + head) * P + p, mask=p < P * limit, other=0.0).to(tl.float32)
                B = tl.load(B_tail_ptr + (entry * G + group) * N + n, mask=n < N * limit, other=0.0).to(tl.float32)
                state += (x * tl.sum(tl.where(token == j, of_kept, 0.0), 0))[:, None] * B[None, :]
        for i in tl.static_range(T):
            x = tl.load(x_ptr + (sequence * T + i) * x_stride + head * P + p, mask=in_p, other=0.0).to(tl.float32)
            B = tl.load(B_ptr + (sequence * T + i) * B_stride + group * N + n, mask=in_n, other=0.0).to(tl.float32)
            state += (x * tl.sum(tl.where(t == i, of_new, 0.0), 0))[:, None] * B[None, :]
        kept_place = pool_ptr + dst.to(tl.int64) * slot_stride + place
        tl.store(kept_place, state.to(pool_ptr.dtype.element_ty), mask=in_p[:, None] & in_n[None, :])


def ssd_tail_update_triton(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    heads: SsdHeads,
    state_pool: Tensor,
    tail: SsdTail,
    tails: Tails,
) -> Tensor:
    R, H, P = x.shape
    G, N = B.shape[1:]
    # Each row of an input and each slot of the pool is contiguous; rows and slots may be apart.
    for name, tensor in (("x", x), ("dt", dt), ("B", B), ("C", C), ("state pool", state_pool)):
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
    y = torch.empty((R, H, P), dtype=x.dtype, device=x.device)
    if len(tails.fields) == 0:
        return y
    tile_p, num_warps = launch_shape(P, tails.rows_each)
    _ssd_tail_update_kernel[(H * cdiv(P, tile_p), len(tails.fields))](
        x,
        dt,
        B,
        C,
        heads.A,
        heads.D,
        heads.dt_bias,
        y,
        state_pool,
        *tail,
        tails.fields,
        x.stride(0),
        dt.stride(0),
        B.stride(0),
        C.stride(0),
        state_pool.stride(0),
        DT_MIN=heads.dt_min,
        DT_MAX=heads.dt_max,
        T=tails.rows_each,
        H=H,
        P=P,
        N=N,
        HEADS_A_GROUP=H // G,
        PLACES=tail.x.shape[1],
        KEPT=next_power_of_2(most_kept(tail.x.shape[1])),
        TILE_P=tile_p,
        PADDED_N=next_power_of_2(N),
        PADDED_T=next_power_of_2(max(1, tails.rows_each)),
        num_warps=num_warps,
        **OVERLAPPED,
    )
    return y


def launch_shape(head_dim: int, rows_each: int) -> tuple[int, int]:
    """Rows of the state that a program holds, and its warps: with drafts fewer, each with more of the registers."""
    return min(32, next_power_of_2(head_dim)), 4 if rows_each == 1 else 2
