"""The square of the positive part: y = max(x, 0)^2. `relu_squared_rows`: in the format that products read.

Shapes    x [T, I], any stride over rows; returns [T, I]
Numerics  float32 inside, rounded once. FP8 is made of the rounded result
Source    So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling"
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


def relu_squared(x: Tensor) -> Tensor:
    _check(x)
    return relu_squared_triton(x) if runs_triton(x) else relu_squared_torch(x)


def relu_squared_rows(x: Tensor, fmt: Fp8Format | None) -> Rows:
    if fmt is None or not runs_triton(x):
        return in_format(relu_squared(x), fmt)
    _check(x)
    return relu_squared_fp8_triton(x, fmt)


def _check(x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"x {tuple(x.shape)}: must have rows and columns")


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


@triton.jit(do_not_specialize=["stride_scale"])
def _relu_squared_fp8_kernel(
    x_ptr, out_ptr, values_ptr, scale_ptr, stride_x, stride_scale,
    INNER: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A row a program. out None: FP8 alone."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_here = column < INNER
    x = tl.maximum(tl.load(x_ptr + row * stride_x + column, mask=is_here, other=0.0).to(tl.float32), 0.0)
    y = (x * x).to(x_ptr.dtype.element_ty)
    if out_ptr is not None:
        tl.store(out_ptr + row * INNER + column, y, mask=is_here)
    store_fp8_row(y.to(tl.float32), values_ptr, scale_ptr, stride_scale, row, 1, INNER, WIDTH, GROUP)


def relu_squared_fp8_triton(x: Tensor, fmt: Fp8Format) -> Fp8Rows:
    T, inner = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"x has strides {x.stride()}: values of one row must lie side by side")
    rows, width = empty_rows(T, inner, fmt, x.dtype, x.device), next_power_of_2(inner)
    if T:
        _relu_squared_fp8_kernel[(T,)](
            x, rows.plain, rows.values, rows.scales, x.stride(0), rows.scales.stride(1),
            INNER=inner, WIDTH=width, GROUP=fmt.group, num_warps=row_warps(width), **OVERLAPPED,
        )  # fmt: skip
    return rows
