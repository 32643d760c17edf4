"""`kernels.gdn_update`'s kernel with its threads placed by hand: same arguments, arithmetic and contract.

Triton spreads a program's warps over keys, and each sum over keys makes them wait for each other twice. Here a warp has
all keys of 16 columns: sums stay within it, and no warp waits for another.

Tests     on a Hopper GPU alone, for Gluon has no interpreter; elsewhere that it compiles
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from kernels.gdn_heads import GdnHeads
from kernels.pdl import HAS_IT, OVERLAPPED
from kernels.rms_norm import L2_NORM_EPS
from kernels.segments import StateSource, steps_of_each
from kernels.softplus import softplus

_softplus = gluon.jit(softplus.fn)


@gluon.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _gdn_update_warps_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_ptr, bias_ptr, o_ptr, pool_ptr, src_ptr, dst_ptr,
    q_stride, k_stride, v_stride, a_stride, b_stride, slot_stride,
    T: gl.constexpr, H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, HEADS_A_KEY: gl.constexpr,
    WIDTH: gl.constexpr, WARPS: gl.constexpr, ACCESS: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    """16 columns a warp, WIDTH of them a thread; DK is a power of two, and 16 * WARPS divides DV."""
    if HAS_IT:
        cuda.gdc_launch_dependents()
    LANES: gl.constexpr = 16 // WIDTH  # across columns
    states: gl.constexpr = gl.BlockedLayout([DK * LANES // 32, WIDTH], [32 // LANES, LANES], [1, WARPS], [1, 0])
    TILES: gl.constexpr = DV // (16 * WARPS)
    head = gl.program_id(0) // TILES
    key = gl.arange(0, DK, gl.SliceLayout(1, states))
    column = gl.program_id(0) % TILES * (16 * WARPS) + gl.arange(0, 16 * WARPS, gl.SliceLayout(0, states))
    sequence = gl.program_id(1)
    pool_ptr += head * DK * DV
    place = (key * DV)[:, None] + column[None, :]
    key_place = head // HEADS_A_KEY * DK + key
    src = gl.load(src_ptr + sequence)
    destinations = ()  # type: tuple
    for t in gl.static_range(T):
        destinations += (gl.load(dst_ptr + sequence * T + t),)
    if HAS_IT:
        cuda.gdc_wait()

    found = (key < gl.where(src >= 0, DK, 0))[:, None] & (column >= 0)[None, :]
    state = gl.load(tl.multiple_of(pool_ptr + src * slot_stride, ACCESS) + place, mask=found, other=0.0)
    A, bias = gl.load(A_ptr + head), gl.load(bias_ptr + head)
    for t in gl.static_range(T):
        row = sequence * T + t
        k = gl.load(k_ptr + row * k_stride + key_place).to(gl.float32)
        q = gl.load(q_ptr + row * q_stride + key_place).to(gl.float32)
        v = gl.load(v_ptr + row * v_stride + head * DV + column).to(gl.float32)
        decay = gl.exp(_softplus(gl.load(a_ptr + row * a_stride + head).to(gl.float32) + bias) * A)
        beta = 1.0 / (1.0 + gl.exp(-gl.load(b_ptr + row * b_stride + head).to(gl.float32)))
        kk, qq, kq = gl.sum(k * k, 0), gl.sum(q * q, 0), gl.sum(k * q, 0)
        wide = state.to(gl.float32)
        state_k, state_q = gl.sum(wide * k[:, None], 0), gl.sum(wide * q[:, None], 0)
        over_k = gl.rsqrt(kk + EPS)
        delta = beta * (v - state_k * (decay * over_k)) * over_k
        o = (state_q * decay + kq * delta) * (gl.rsqrt(qq + EPS) * DK**-0.5)
        gl.store(o_ptr + (row * H + head) * DV + column, o.to(o_ptr.dtype.element_ty))
        state = (wide * decay + k[:, None] * delta[None, :]).to(pool_ptr.dtype.element_ty)
        dst = destinations[t]
        kept = (key < gl.where(dst >= 0, DK, 0))[:, None] & (column >= 0)[None, :]
        gl.store(tl.multiple_of(pool_ptr + dst * slot_stride, ACCESS) + place, state, mask=kept)


def launch_update_hopper(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, heads: GdnHeads, o: Tensor, state_pool: Tensor,
    source: StateSource, dst_slots: Tensor, num_warps: int, width: int, access_bytes: int, registers: int | None,
) -> None:  # fmt: skip
    T = steps_of_each(dst_slots, len(v))
    R, Hv, Dv = v.shape
    Hk, Dk = k.shape[1:]
    _gdn_update_warps_kernel[(Hv * (Dv // (16 * num_warps)), R // T)](
        q, k, v, a, b, heads.A, heads.dt_bias, o, state_pool, source.slots_N, dst_slots,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), state_pool.stride(0),
        T=T, H=Hv, DK=Dk, DV=Dv, HEADS_A_KEY=Hv // Hk, WIDTH=width, WARPS=num_warps, ACCESS=access_bytes,
        EPS=L2_NORM_EPS, num_warps=num_warps, maxnreg=registers if T == 1 else None, **OVERLAPPED,
    )  # fmt: skip


def fits_hopper(state_pool: Tensor) -> bool:
    """Whether the chip, the dtype and the sizes are such as the kernel takes."""
    return (
        state_pool.is_cuda
        and torch.cuda.get_device_capability(state_pool.device)[0] == 9
        and state_pool.dtype == torch.bfloat16
        and state_pool.shape[2:] == (128, 128)
    )
