"""Mamba1 decode steps of each sequence of a batch, from source slots to destination slots.

    S = exp(dt * A) * S + (dt * x) outer B          y = (S C + D * x) * silu(gate)

Shapes    x, dt, gate [R, I]; B, C [R, N]; channels: A, D and the bias of dt; state_pool [S, I, N] float32 or bfloat16,
          any stride over slots; dst_slots [B, T] int64, or [B] when T = 1; returns y [R, I] in x's dtype. B sequences
          of T rows (a token and its drafts) make R = B * T rows, a sequence's rows one after the other; row t's state
          goes to dst_slots[:, t]
Contract  dt is raw, as projected (headrace/kernels/mamba1/channels.py); destinations are unique; one may be its own
          sequence's source and no other's; every source is read before any slot is written; B = 0 is a no-op. In the
          Triton kernel a destination of -1, that of a captured graph's padding row, is written nowhere; slots are read
          early: an overlapped kernel (headrace/kernels/lib/pdl.py) must not have written them just before
Numerics  all arithmetic in float32; T rows at once equal T steps of one row, a bfloat16 pool's rounding after each row
          included
Source    Gu & Dao 2023, "Mamba" (recurrent form)
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.exponentials import LOG2_E, softplus
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.segments import StateSource, steps_of_each
from headrace.kernels.lib.sizes import cdiv, next_power_of_2
from headrace.kernels.mamba1.channels import Mamba1Channels, check_contiguous_rows, check_rows


def mamba1_update(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    gate: Tensor,
    channels: Mamba1Channels,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    check_rows(x, dt, B, C, gate, state_pool)
    implementation = mamba1_update_triton if runs_triton(x) else mamba1_update_torch
    return implementation(x, dt, B, C, gate, channels, state_pool, source, dst_slots)


def mamba1_update_torch(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    gate: Tensor,
    channels: Mamba1Channels,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    T = steps_of_each(dst_slots, len(x))
    dst_slots = dst_slots.view(-1, T)
    state = source.read(state_pool).float()
    dt, wide = channels.time_steps(dt), x.float()
    gain, B, C = dt * wide, B.float(), C.float()
    y = torch.empty_like(wide)
    for t in range(T):
        rows = slice(t, None, T)
        state.mul_(torch.exp(dt[rows, :, None] * channels.A)).addcmul_(gain[rows, :, None], B[rows, None])
        y[rows] = torch.bmm(state, C[rows, :, None])[..., 0]
        rounded = state.to(state_pool.dtype)
        state_pool.index_copy_(0, dst_slots[:, t], rounded)
        state = rounded.float()
    return y.addcmul_(wide, channels.D).mul_(F.silu(gate.float())).to(x.dtype)


@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _mamba1_update_kernel(
    x_ptr,
    dt_ptr,
    B_ptr,
    C_ptr,
    gate_ptr,
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
    gate_stride,
    slot_stride,
    T: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PADDED_N: tl.constexpr,
):
    """A program holds the states of BLOCK_I channels in registers: read once, written once a step."""
    let_next_start()
    i, n = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, PADDED_N)
    sequence = tl.program_id(1)
    in_i, in_n = i < WIDTH, n < N
    in_state = in_i[:, None] & in_n[None, :]
    place = i[:, None] * N + n[None, :]
    A = tl.load(A_ptr + place, mask=in_state, other=0.0) * LOG2_E
    D = tl.load(D_ptr + i, mask=in_i, other=0.0)
    bias = tl.load(bias_ptr + i, mask=in_i, other=0.0)
    src = tl.load(src_ptr + sequence)
    destinations = ()  # type: tuple
    for t in tl.static_range(T):
        destinations += (tl.load(dst_ptr + sequence * T + t),)
    wait_for_previous()

    found = (i < tl.where(src >= 0, WIDTH, 0))[:, None] & in_n[None, :]
    state = tl.load(pool_ptr + src * slot_stride + place, mask=found, other=0.0).to(tl.float32)
    for t in tl.static_range(T):
        row = (sequence * T + t).to(tl.int64)
        raw = tl.load(dt_ptr + row * dt_stride + i, mask=in_i, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + i, mask=in_i, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * gate_stride + i, mask=in_i, other=0.0).to(tl.float32)
        B = tl.load(B_ptr + row * B_stride + n, mask=in_n, other=0.0).to(tl.float32)
        C = tl.load(C_ptr + row * C_stride + n, mask=in_n, other=0.0).to(tl.float32)
        dt = softplus(raw + bias)
        state = state * tl.exp2(dt[:, None] * A) + (dt * x)[:, None] * B[None, :]
        y = (tl.sum(state * C[None, :], axis=1) + D * x) * gate * tl.sigmoid(gate)
        tl.store(y_ptr + row * WIDTH + i, y.to(y_ptr.dtype.element_ty), mask=in_i)
        rounded = state.to(pool_ptr.dtype.element_ty)
        dst = destinations[t]
        kept = (i < tl.where(dst >= 0, WIDTH, 0))[:, None] & in_n[None, :]
        tl.store(pool_ptr + dst * slot_stride + place, rounded, mask=kept)
        state = rounded.to(tl.float32)


def mamba1_update_triton(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    gate: Tensor,
    channels: Mamba1Channels,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    T = steps_of_each(dst_slots, len(x))
    check_contiguous_rows(x=x, dt=dt, B=B, C=C, gate=gate, state_pool=state_pool)
    R, width = x.shape
    N = B.shape[1]
    y = torch.empty((R, width), dtype=x.dtype, device=x.device)
    if R == 0:
        return y
    block_i, num_warps = update_tile(N)
    _mamba1_update_kernel[(cdiv(width, block_i), R // T)](
        x,
        dt,
        B,
        C,
        gate,
        channels.A,
        channels.D,
        channels.dt_bias,
        y,
        state_pool,
        source.slots_N,
        dst_slots,
        x.stride(0),
        dt.stride(0),
        B.stride(0),
        C.stride(0),
        gate.stride(0),
        state_pool.stride(0),
        T=T,
        WIDTH=width,
        N=N,
        BLOCK_I=block_i,
        PADDED_N=next_power_of_2(N),
        num_warps=num_warps,
        **OVERLAPPED,
    )
    return y


def update_tile(state_size: int) -> tuple[int, int]:
    """Channels that a program holds, and its warps: about 4 KiB of float32 states, as small as those of Mamba2's."""
    return max(1, 1024 // next_power_of_2(state_size)), 2
