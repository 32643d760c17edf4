"""SwiGLU's gate: y = silu(gate) * up. `swiglu_rows`: in the format that their product reads (fp8_rows.py).

Shapes    gate_up [T, 2I], gate columns first, any stride over rows; returns [T, I]
Numerics  float32 inside, rounded once (torch: after the SiLU, too). FP8 is made of the rounded result
Source    Shazeer 2020, "GLU Variants Improve Transformer"
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.fp8_rows import Fp8Format, Fp8Rows, Rows, empty_rows, in_format, row_warps, store_fp8_row
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def swiglu(gate_up: Tensor) -> Tensor:
    _check(gate_up)
    return swiglu_triton(gate_up) if runs_triton(gate_up) else swiglu_torch(gate_up)


def swiglu_rows(gate_up: Tensor, fmt: Fp8Format | None) -> Rows:
    if fmt is None or not runs_triton(gate_up):
        return in_format(swiglu(gate_up), fmt)
    _check(gate_up)
    return swiglu_fp8_triton(gate_up, fmt)


def _check(gate_up: Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} does not fall into two halves")


def swiglu_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, stride_x, INNER: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start()
    wait_for_previous()
    row = (tl.program_id(0) // tl.cdiv(INNER, BLOCK)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(INNER, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    is_here = column < INNER
    gate = tl.load(x_ptr + row * stride_x + column, mask=is_here).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + INNER + column, mask=is_here).to(tl.float32)
    tl.store(out_ptr + row * INNER + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=is_here)


def swiglu_triton(gate_up: Tensor, block: int = 2048, num_warps: int = 4) -> Tensor:
    T, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        raise ValueError(f"gate_up has strides {gate_up.stride()}: values of one row must lie side by side")
    out = torch.empty((T, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(block, next_power_of_2(inner))
    if T:
        _swiglu_kernel[(T * cdiv(inner, block),)](
            gate_up, out, gate_up.stride(0), INNER=inner, BLOCK=block, num_warps=num_warps, **OVERLAPPED
        )
    return out


@triton.jit(do_not_specialize=["stride_scale"])
def _swiglu_fp8_kernel(
    x_ptr, out_ptr, values_ptr, scale_ptr, stride_x, stride_scale,
    INNER: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A row a program. out None: FP8 alone."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_here = column < INNER
    gate = tl.load(x_ptr + row * stride_x + column, mask=is_here, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + INNER + column, mask=is_here, other=0.0).to(tl.float32)
    y = (gate * tl.sigmoid(gate) * up).to(x_ptr.dtype.element_ty)
    if out_ptr is not None:
        tl.store(out_ptr + row * INNER + column, y, mask=is_here)
    store_fp8_row(y.to(tl.float32), values_ptr, scale_ptr, stride_scale, row, 1, INNER, WIDTH, GROUP)


def swiglu_fp8_triton(gate_up: Tensor, fmt: Fp8Format) -> Fp8Rows:
    T, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        raise ValueError(f"gate_up has strides {gate_up.stride()}: values of one row must lie side by side")
    rows, width = empty_rows(T, inner, fmt, gate_up.dtype, gate_up.device), next_power_of_2(inner)
    if T:
        _swiglu_fp8_kernel[(T,)](
            gate_up, rows.plain, rows.values, rows.scales, gate_up.stride(0), rows.scales.stride(1),
            INNER=inner, WIDTH=width, GROUP=fmt.group, num_warps=row_warps(width), **OVERLAPPED,
        )  # fmt: skip
    return rows
