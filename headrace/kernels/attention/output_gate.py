"""Output gate of attention: y = x * sigmoid(gate), of rows that paged_prefill returns. Decodes gate as they merge.

Shapes    x [T, H, D] without gaps; gate [T, H, D], any stride over rows; returns [T, H, D]
Contract  on a GPU y is written over x
Numerics  Triton: in float32, rounded once. torch: each step in x's dtype
Source    Qiu et al. 2025, "Gated Attention for Large Language Models"
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def gate_output(x: Tensor, gate: Tensor) -> Tensor:
    D = x.shape[-1]
    if x.dim() != 3 or x.shape != gate.shape or not x.is_contiguous() or gate.stride()[1:] != (D, 1):
        raise ValueError(
            f"x {tuple(x.shape)} of strides {x.stride()}, gate {tuple(gate.shape)} of strides {gate.stride()}: "
            "must have one shape, and each row's heads side by side"
        )
    return gate_output_triton(x, gate) if runs_triton(x) else gate_output_torch(x, gate)


def gate_output_torch(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


@triton.jit
def _gate_kernel(x_ptr, gate_ptr, stride_gate, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start()
    row = (tl.program_id(0) // tl.cdiv(WIDTH, BLOCK)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(WIDTH, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    is_here = column < WIDTH
    wait_for_previous()
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=is_here, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * WIDTH + column, mask=is_here, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * WIDTH + column, (x * tl.sigmoid(gate)).to(x_ptr.dtype.element_ty), mask=is_here)


def gate_output_triton(x: Tensor, gate: Tensor) -> Tensor:
    T, H, D = x.shape
    width = H * D
    block = min(2048, next_power_of_2(width))
    if T:
        _gate_kernel[(T * cdiv(width, block),)](x, gate, gate.stride(0), WIDTH=width, BLOCK=block, **OVERLAPPED)
    return x
