"""RMS norms of the three parts of Jamba's projection in one pass: time steps, B and C, each by itself.

    y_part = x_part / sqrt(mean(x_part^2) + eps) * weight_part

Shapes    x [T, R + 2 N], any stride over rows; weight [R + 2 N]; returns y [T, R + 2 N]
Numerics  float32 inside, the result in x's dtype
Source    Lieber et al. 2024, "Jamba"; each part as in headrace/kernels/dense/rms_norm.py
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.rms_norm import rms_norm_torch
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import next_power_of_2


def norm_parts(x: Tensor, weight: Tensor, dt_rank: int, eps: float) -> Tensor:
    """`dt_rank` is R; what is behind it are B and C, of one size."""
    if x.shape[1:] != weight.shape or (len(weight) - dt_rank) % 2:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and {dt_rank} time steps disagree")
    return (norm_parts_triton if runs_triton(x) else norm_parts_torch)(x, weight, dt_rank, eps)


def norm_parts_torch(x: Tensor, weight: Tensor, dt_rank: int, eps: float) -> Tensor:
    state_size = (len(weight) - dt_rank) // 2
    sizes = (dt_rank, state_size, state_size)
    parts = zip(x.split(sizes, dim=-1), weight.split(sizes), strict=True)
    return torch.cat([rms_norm_torch(part, its_weight, eps) for part, its_weight in parts], dim=-1)


@triton.jit
def _norm_parts_kernel(
    x_ptr, weight_ptr, y_ptr, x_stride, eps, R: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    let_next_start()
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = j < R + 2 * N
    weight = tl.load(weight_ptr + j, mask=here, other=0.0)
    wait_for_previous()
    x = tl.load(x_ptr + row * x_stride + j, mask=here, other=0.0).to(tl.float32)
    square = x * x
    mean_dt = tl.sum(tl.where(j < R, square, 0.0), 0) / R
    mean_B = tl.sum(tl.where((j >= R) & (j < R + N), square, 0.0), 0) / N
    mean_C = tl.sum(tl.where(j >= R + N, square, 0.0), 0) / N
    mean = tl.where(j < R, mean_dt, tl.where(j < R + N, mean_B, mean_C))
    y = x * tl.rsqrt(mean + eps) * weight
    tl.store(y_ptr + row * (R + 2 * N) + j, y.to(y_ptr.dtype.element_ty), mask=here)


def norm_parts_triton(x: Tensor, weight: Tensor, dt_rank: int, eps: float) -> Tensor:
    T, width = x.shape
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("values of one row must lie side by side, and weights have no gaps")
    y = torch.empty((T, width), dtype=x.dtype, device=x.device)
    if T:
        _norm_parts_kernel[(T,)](
            x, weight, y, x.stride(0), eps,
            R=dt_rank, N=(width - dt_rank) // 2, BLOCK=next_power_of_2(width), num_warps=2, **OVERLAPPED,
        )  # fmt: skip
    return y
