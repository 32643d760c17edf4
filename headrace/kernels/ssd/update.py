"""Mamba2 (SSD) decode steps of each sequence of a batch, from source slots to destination slots.

    S = exp(dt * A) * S + (dt * x) outer B          y = S C + D * x

Shapes    x [R, H, P]; dt [R, H]; B, C [R, G, N]; heads: A, D and the parameters of dt; state_pool [S, H,
          P, N] float32 or bfloat16, any stride over slots; dst_slots [B, T] int64, or [B] when T = 1; returns
          y [R, H, P] in x's dtype. B sequences of T rows (a token and its drafts) make R = B * T rows, a
          sequence's rows one after the other; row t's state goes to dst_slots[:, t]
Contract  dt is raw, as projected (headrace/kernels/ssd/heads.py); destinations are unique; one may be its
          own sequence's source and no other's; every source is read before any slot is written; B = 0 is a
          no-op. In the Triton kernel a destination of -1, that of a captured graph's padding row, is written
          nowhere; slots are read early: an overlapped kernel (headrace/kernels/lib/pdl.py) must not have written
          them just before
Numerics  all arithmetic in float32; T rows at once equal T steps of one row, a bfloat16 pool's rounding after
          each row included
Source    Dao & Gu 2024, "Transformers are SSMs" (recurrent form)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.segments import StateSource, steps_of_each
from headrace.kernels.lib.sizes import cdiv, next_power_of_2
from headrace.kernels.ssd.heads import SsdHeads, time_step


def ssd_update(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    heads: SsdHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    H, P = x.shape[1:]
    if H % B.shape[1] or B.shape != C.shape:
        raise ValueError(f"x {tuple(x.shape)}, B {tuple(B.shape)}, C {tuple(C.shape)} disagree")
    if state_pool.shape[1:] != (H, P, B.shape[2]) or state_pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype} does not hold these states")
    implementation = ssd_update_triton if runs_triton(x) else ssd_update_torch
    return implementation(x, dt, B, C, heads, state_pool, source, dst_slots)


def ssd_update_torch(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    heads: SsdHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    T = steps_of_each(dst_slots, len(x))
    state = source.read(state_pool).float()
    dt = heads.time_steps(dt)
    if T == 1:
        y = _step(x, dt, B, C, heads, state)
        state_pool.index_copy_(0, dst_slots.flatten(), state.to(state_pool.dtype))
        return y
    outputs = []
    for t, dst in enumerate(dst_slots.unbind(1)):
        outputs.append(_step(x[t::T], dt[t::T], B[t::T], C[t::T], heads, state))
        rounded = state.to(state_pool.dtype)
        state_pool.index_copy_(0, dst, rounded)
        state = rounded.float()
    return torch.stack(outputs, dim=1).flatten(0, 1)


def _step(x: Tensor, dt_BH: Tensor, B: Tensor, C: Tensor, heads: SsdHeads, state: Tensor) -> Tensor:
    """One row of each sequence: returns y, changes `state` [B, H, P, N]."""
    batch, H, P = x.shape
    G, N = B.shape[1:]
    x_BHP = x.float()
    state.mul_(torch.exp(dt_BH * heads.A)[..., None, None])
    # Heads of a group share B and C: one rank-1 update and one product a group instead of a head.
    grouped = state.view(batch * G, H // G * P, N)
    grouped.baddbmm_((x_BHP * dt_BH[..., None]).view(batch * G, H // G * P, 1), B.float().reshape(batch * G, 1, N))
    y = torch.bmm(grouped, C.float().reshape(batch * G, N, 1)).view(batch, H, P)
    return y.addcmul_(x_BHP, heads.D[:, None]).to(x.dtype)


@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _ssd_update_kernel(
    x_ptr,
    dt_ptr,
    B_ptr,
    C_ptr,
    A_ptr,
    D_ptr,
    bias_ptr,
    y_ptr,
    pool_ptr,
    src_ptr,
    dst_ptr,
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
    TILE_P: tl.constexpr,
    PADDED_N: tl.constexpr,
):
    """A program holds TILE_P rows of one head's state in registers: read once, written once a step."""
    let_next_start()
    head = tl.program_id(0) // tl.cdiv(P, TILE_P)
    p = tl.program_id(0) % tl.cdiv(P, TILE_P) * TILE_P + tl.arange(0, TILE_P)
    n = tl.arange(0, PADDED_N)
    sequence = tl.program_id(1)
    in_p, in_n = p < P, n < N
    place = head * P * N + p[:, None] * N + n[None, :]
    group = head // HEADS_A_GROUP * N + n
    A = tl.load(A_ptr + head)
    D = tl.load(D_ptr + head)
    bias = tl.load(bias_ptr + head)
    src = tl.load(src_ptr + sequence)
    destinations = ()  # type: tuple
    for t in tl.static_range(T):
        destinations += (tl.load(dst_ptr + sequence * T + t),)
    wait_for_previous()

    found = (p < tl.where(src >= 0, P, 0))[:, None] & in_n[None, :]
    state = tl.load(pool_ptr + src * slot_stride + place, mask=found, other=0.0).to(tl.float32)
    for t in tl.static_range(T):
        row = sequence * T + t
        dt = time_step(tl.load(dt_ptr + row * dt_stride + head), bias, DT_MIN, DT_MAX)
        x = tl.load(x_ptr + row * x_stride + head * P + p, mask=in_p, other=0.0).to(tl.float32)
        B = tl.load(B_ptr + row * B_stride + group, mask=in_n, other=0.0).to(tl.float32)
        C = tl.load(C_ptr + row * C_stride + group, mask=in_n, other=0.0).to(tl.float32)
        state = state * tl.exp(dt * A) + (dt * x)[:, None] * B[None, :]
        y = tl.sum(state * C[None, :], axis=1) + D * x
        tl.store(y_ptr + (row * H + head) * P + p, y.to(y_ptr.dtype.element_ty), mask=in_p)
        rounded = state.to(pool_ptr.dtype.element_ty)
        dst = destinations[t]
        kept = (p < tl.where(dst >= 0, P, 0))[:, None] & in_n[None, :]
        tl.store(pool_ptr + dst * slot_stride + place, rounded, mask=kept)
        state = rounded.to(tl.float32)


def ssd_update_triton(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    heads: SsdHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    T = steps_of_each(dst_slots, len(x))
    R, H, P = x.shape
    G, N = B.shape[1:]
    # Each row of an input and each slot of the pool is contiguous; rows and slots may be apart.
    for name, tensor in (("x", x), ("dt", dt), ("B", B), ("C", C), ("state pool", state_pool)):
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
    y = torch.empty((R, H, P), dtype=x.dtype, device=x.device)
    if R == 0:
        return y
    tile_p, num_warps = launch_shape(P)
    _ssd_update_kernel[(H * cdiv(P, tile_p), R // T)](
        x,
        dt,
        B,
        C,
        heads.A,
        heads.D,
        heads.dt_bias,
        y,
        state_pool,
        source.slots_N,
        dst_slots,
        x.stride(0),
        dt.stride(0),
        B.stride(0),
        C.stride(0),
        state_pool.stride(0),
        DT_MIN=heads.dt_min,
        DT_MAX=heads.dt_max,
        T=T,
        H=H,
        P=P,
        N=N,
        HEADS_A_GROUP=H // G,
        TILE_P=tile_p,
        PADDED_N=next_power_of_2(N),
        num_warps=num_warps,
        **OVERLAPPED,
    )
    return y


def launch_shape(head_dim: int) -> tuple[int, int]:
    """Rows of the state that a program holds, and its warps.

    The best of five measured on an H200 at batches of 1, 16, 64 and 256 (`gpu_kernels_state --variants` of 58e2fd5):
    small programs, of which many wait for their bytes while others compute. Prefetching states into the second-level
    cache while earlier kernels end gained nothing for one sequence and lost a fifth for sixteen.
    """
    return min(16, next_power_of_2(head_dim)), 2
