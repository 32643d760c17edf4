"""SwiGLU's gate: y = silu(gate) * up.

Shapes    gate_up [T, 2I], gate columns first, any stride over rows; returns [T, I]
Numerics  float32 inside, rounded once (torch: after the SiLU, too)
Source    Shazeer 2020, "GLU Variants Improve Transformer"
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def swiglu(gate_up: Tensor) -> Tensor:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} does not fall into two halves")
    return swiglu_triton(gate_up) if runs_triton(gate_up) else swiglu_torch(gate_up)


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
