"""The square of the positive part: y = max(x, 0)^2.

Shapes    x [T, I], any stride over rows; returns [T, I]
Numerics  float32 inside, rounded once
Source    So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling"
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def relu_squared(x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise ValueError(f"x {tuple(x.shape)}: must have rows and columns")
    return relu_squared_triton(x) if runs_triton(x) else relu_squared_torch(x)


def relu_squared_torch(x: Tensor) -> Tensor:
    return F.relu(x).square_()


@triton.jit
def _relu_squared_kernel(x_ptr, out_ptr, stride_x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start()
    wait_for_previous()
    row = (tl.program_id(0) // tl.cdiv(WIDTH, BLOCK)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(WIDTH, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    is_here = column < WIDTH
    x = tl.maximum(tl.load(x_ptr + row * stride_x + column, mask=is_here, other=0.0).to(tl.float32), 0.0)
    tl.store(out_ptr + row * WIDTH + column, (x * x).to(out_ptr.dtype.element_ty), mask=is_here)


def relu_squared_triton(x: Tensor, block: int = 2048, num_warps: int = 4) -> Tensor:
    T, width = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"x has strides {x.stride()}: values of one row must lie side by side")
    out = torch.empty((T, width), dtype=x.dtype, device=x.device)
    block = min(block, next_power_of_2(width))
    if T:
        _relu_squared_kernel[(T * cdiv(width, block),)](
            x, out, x.stride(0), WIDTH=width, BLOCK=block, num_warps=num_warps, **OVERLAPPED
        )
    return out
