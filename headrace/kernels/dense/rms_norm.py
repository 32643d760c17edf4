"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * weight; alone, or after a residual addition.

    add_rms_norm        s = x + alpha * branch;  returns s, rms_norm(s)
    *_rows              the same, with the normed rows in the format that their products read (fp8_rows.py)

Shapes    x [..., D]; weight [D] or anything that broadcasts to x from the right ([H, D]: one weight a head);
          add_rms_norm: x [T, D], weight [D]; branch [T, D] in x's dtype, or parts [S, T, D] in float32 that sum to it
Contract  models whose weight is stored as an offset from one (Qwen) add the one at load time; rows may have any
          stride, also those of `out`, which rms_norm of rows may be given
Numerics  float32 inside, the result in x's dtype; s is rounded to it before the norm. FP8 is made of the rounded result
Source    Zhang & Sennrich 2019, "Root Mean Square Layer Normalization"
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.fp8_rows import (
    Fp8Format,
    Fp8Rows,
    Rows,
    empty_rows,
    in_format,
    store_fp8_row,
    sum_and_largest,
)
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

L2_NORM_EPS = 1e-6  # for the delta rule's keys and queries


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in the last dimension")
    if out is not None and (x.dim(), out.shape, out.dtype, out.stride(-1)) != (2, x.shape, x.dtype, 1):
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} of strides {out.stride()} holds no rows of {x.dtype}")
    return (rms_norm_triton if runs_triton(x) else rms_norm_torch)(x, weight, eps, out)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    wide = x.float()
    normed = torch.mul(wide, inverse_rms(wide, eps)).mul_(weight)
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float, fmt: Fp8Format | None) -> Rows:
    if x.dim() != 2 or x.shape[1:] != weight.shape:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: must be rows and a weight for all")
    if fmt is None or not runs_triton(x):
        return in_format(rms_norm(x, weight, eps), fmt)
    return rms_norm_fp8_triton(x, weight, eps, fmt)


def add_rms_norm(x: Tensor, branch: Tensor, alpha: float, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check_sum(x, branch, weight)
    add = add_rms_norm_triton if runs_triton(x) else add_rms_norm_torch
    return add(x, branch, alpha, weight, eps)


def add_rms_norm_rows(
    x: Tensor, branch: Tensor, alpha: float, weight: Tensor, eps: float, fmt: Fp8Format | None
) -> tuple[Tensor, Rows]:
    if fmt is None or not runs_triton(x):
        total, normed = add_rms_norm(x, branch, alpha, weight, eps)
        return total, in_format(normed, fmt)
    _check_sum(x, branch, weight)
    return add_rms_norm_fp8_triton(x, branch, alpha, weight, eps, fmt)


def _check_sum(x: Tensor, branch: Tensor, weight: Tensor) -> None:
    dtype = x.dtype if branch.dim() == 2 else torch.float32
    if x.shape != branch.shape[-2:] or x.dim() != 2 or dtype != branch.dtype or weight.shape != x.shape[1:]:
        raise ValueError(f"x {tuple(x.shape)}, branch {tuple(branch.shape)}, weight {tuple(weight.shape)} disagree")


def add_rms_norm_torch(x: Tensor, branch: Tensor, alpha: float, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if branch.dim() == 3:
        branch = branch.sum(0).to(x.dtype)
    total = torch.add(x, branch, alpha=alpha)
    return total, rms_norm_torch(total, weight, eps)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, which is kept with size 1: three small operations, not six."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def l2_normalize(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_constant(eps, x.device), norm, norm).rsqrt_()


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


@triton.jit(do_not_specialize=["num_rows", "stride_scale"])
def _rms_norm_kernel(
    x_ptr, branch_ptr, weight_ptr, sum_ptr, out_ptr,
    values_ptr, scale_ptr,  # None: no FP8
    num_rows, num_weights, stride_x, stride_branch, stride_out, stride_scale, alpha, eps,
    D: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program, one where it writes FP8; row r takes weight row r % num_weights; sum has no gaps between
    rows. The branch is the sum of PARTS tensors, num_rows rows apart; PARTS = 0: no branch."""
    let_next_start()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    is_here = (row < num_rows) & (d < D)
    weight_row = row % num_weights
    row = row.to(tl.int64)
    weight = tl.load(weight_ptr + weight_row * D + d, mask=d < D, other=0.0)
    wait_for_previous()
    x = tl.load(x_ptr + row * stride_x + d, mask=is_here, other=0.0)
    wide = x.to(tl.float32)
    if PARTS:
        branch = tl.load(branch_ptr + row * stride_branch + d, mask=is_here, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            branch += tl.load(branch_ptr + (part * num_rows + row) * stride_branch + d, mask=is_here, other=0.0)
        wide += alpha * branch
        total = wide.to(x.dtype)
        tl.store(sum_ptr + row * D + d, total, mask=is_here)
        wide = total.to(tl.float32)
    weighted = wide * weight
    largest = None
    if values_ptr is not None and GROUP == 0:
        squares, largest = tl.reduce((wide * wide, tl.abs(weighted)), 1, sum_and_largest)
    else:
        squares = tl.sum(wide * wide, 1)
    factor = tl.rsqrt(squares / D + eps)
    y = (weighted * factor[:, None]).to(x.dtype)
    if out_ptr is not None:
        tl.store(out_ptr + row * stride_out + d, y, mask=is_here)
    if values_ptr is not None:
        if largest is not None:
            largest = (largest * factor).to(x.dtype).to(tl.float32)  # that of y: rounding keeps the order
        here = tl.program_id(0).to(tl.int64)
        store_fp8_row(y.to(tl.float32), values_ptr, scale_ptr, stride_scale, here, 1, D, BLOCK_D, GROUP, largest)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    D = x.shape[-1]
    _launch(x.reshape(-1, D), None, 0.0, weight, eps, None, out.view(-1, D))
    return out


def rms_norm_fp8_triton(x: Tensor, weight: Tensor, eps: float, fmt: Fp8Format) -> Fp8Rows:
    rows = empty_rows(len(x), x.shape[1], fmt, x.dtype, x.device)
    _launch(x, None, 0.0, weight, eps, None, rows.plain, rows, fmt.group)
    return rows


def add_rms_norm_triton(x: Tensor, branch: Tensor, alpha: float, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, branch, alpha, weight, eps, total, out)
    return total, out


def add_rms_norm_fp8_triton(
    x: Tensor, branch: Tensor, alpha: float, weight: Tensor, eps: float, fmt: Fp8Format
) -> tuple[Tensor, Fp8Rows]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = empty_rows(len(x), x.shape[1], fmt, x.dtype, x.device)
    _launch(x, branch, alpha, weight, eps, total, rows.plain, rows, fmt.group)
    return total, rows


def _launch(
    x: Tensor,
    branch: Tensor | None,
    alpha: float,
    weight: Tensor,
    eps: float,
    total: Tensor | None,
    out: Tensor | None,
    quantised: Fp8Rows | None = None,
    group: int = 0,
) -> None:
    """x, branch [T, D] or parts [S, T, D]; a weight of several rows repeats along T."""
    T, D = x.shape
    parts = 0 if branch is None else len(branch) if branch.dim() == 3 else 1
    if x.stride(1) != 1 or (branch is not None and branch.stride(-1) != 1) or not weight.is_contiguous():
        raise ValueError("values of one row must lie side by side, and weights have no gaps")
    if parts > 1 and branch is not None and not branch.is_contiguous():
        raise ValueError(f"parts have strides {branch.stride()}: they must have no gaps")
    rows, num_warps = row_tile(D)
    values, scales, stride_scale = None, None, 0
    if quantised is not None:
        values, scales, stride_scale, rows = quantised.values, quantised.scales, quantised.scales.stride(1), 1
    if T:
        _rms_norm_kernel[(cdiv(T, rows),)](
            x, branch, weight, total, out, values, scales, T, weight.numel() // D,
            x.stride(0), 0 if branch is None else branch.stride(-2), 0 if out is None else out.stride(0),
            stride_scale, alpha, eps,
            D=D, PARTS=parts, ROWS=rows, BLOCK_D=next_power_of_2(D), GROUP=group,
            num_warps=2 * num_warps if parts > 1 else num_warps, **OVERLAPPED,
        )  # fmt: skip


def row_tile(D: int) -> tuple[int, int]:
    """Rows a program, and its warps: about 2,048 values, 8 a thread. With 16 a thread a layer's products and norms took
    2 to 4 % longer at up to 64 rows (`python3 -m benchmarks kernels-products --only chain`)."""
    return max(1, 2048 // next_power_of_2(D)), 8
