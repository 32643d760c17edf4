"""RMS normalisation with a gate, in the two orders that mixers use.

    gate_then_norm   norm_group(x * silu(gate)) * weight     Mamba2: groups of D / num_groups values
                                                             weight None: x * silu(gate), without a norm
    norm_then_gate   norm(x) * weight * silu(gate)           gated delta net: each head by itself
                                                             `sigmoid`, Kimi's: sigmoid(gate) instead of silu(gate)
    *_rows           the same as rows [T, D] or [T, H * D], in the format that their products read (fp8_rows.py)

Shapes    gate_then_norm: x, gate [T, D]; weight [D].   norm_then_gate: x, gate [T, H, D]; weight [D].
Contract  the gate may have any row stride; num_groups divides D
Numerics  float32 inside, the result in x's dtype. FP8 is made of the rounded result
Source    Dao & Gu 2024 (Mamba2's grouped norm); Yang et al. 2024, "Gated Delta Networks"
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.fp8_rows import (
    Fp8Format,
    Fp8Rows,
    Rows,
    empty_rows,
    groups_fit,
    in_format,
    quantise_rows,
    store_fp8_row,
    sum_and_largest,
)
from headrace.kernels.dense.rms_norm import inverse_rms, rms_norm_torch
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def gate_then_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int) -> Tensor:
    _check_groups(x, gate, weight, num_groups)
    norm = gate_then_norm_triton if runs_triton(x) else gate_then_norm_torch
    return norm(x, gate, weight, eps, num_groups)


def gate_then_norm_rows(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int, fmt: Fp8Format | None
) -> Rows:
    """`gate_then_norm`, in FP8 for what reads `fmt`."""
    if fmt is None or not runs_triton(x):
        return in_format(gate_then_norm(x, gate, weight, eps, num_groups), fmt)
    _check_groups(x, gate, weight, num_groups)
    return gate_then_norm_fp8_triton(x, gate, weight, eps, num_groups, fmt)


def _check_groups(x: Tensor, gate: Tensor, weight: Tensor | None, num_groups: int) -> None:
    if x.shape != gate.shape or (weight is not None and weight.shape != x.shape[-1:]) or x.shape[-1] % num_groups:
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {shape} disagree")


def gate_then_norm_torch(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int) -> Tensor:
    T, D = x.shape
    gated = F.silu(gate.float()).mul_(x)
    if weight is None:
        return gated.to(x.dtype)
    gated = gated.view(T, num_groups, D // num_groups)
    return gated.mul_(inverse_rms(gated, eps)).view(T, D).mul_(weight).to(x.dtype)


def norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    _check_heads(x, gate, weight)
    return (norm_then_gate_triton if runs_triton(x) else norm_then_gate_torch)(x, gate, weight, eps, sigmoid)


def norm_then_gate_rows(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, fmt: Fp8Format | None, sigmoid: bool = False
) -> Rows:
    """`norm_then_gate` as rows [T, H * D], in FP8 for what reads `fmt`."""
    if fmt is None or not runs_triton(x):
        return in_format(norm_then_gate(x, gate, weight, eps, sigmoid).flatten(1), fmt)
    _check_heads(x, gate, weight)
    return norm_then_gate_fp8_triton(x, gate, weight, eps, fmt, sigmoid)


def _check_heads(x: Tensor, gate: Tensor, weight: Tensor) -> None:
    if x.shape != gate.shape or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)} disagree")


def norm_then_gate_torch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    factor = gate.float().sigmoid() if sigmoid else F.silu(gate.float())
    return rms_norm_torch(x.float(), weight, eps).mul_(factor).to(x.dtype)


@triton.jit(do_not_specialize=["num_rows", "stride_scale"])
def _gated_norm_kernel(
    x_ptr, gate_ptr,
    weight_ptr,  # None: no norm
    out_ptr,
    values_ptr, scale_ptr,  # None: no FP8
    num_rows, stride_x, stride_gate, stride_scale, eps,
    GROUPS: tl.constexpr, D: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows are groups of D values, GROUPS side by side in each token, ROWS a program; where it writes FP8, those of one
    token. out has no gaps."""
    let_next_start()
    if values_ptr is not None:
        token = tl.program_id(0).to(tl.int64)
        group = tl.arange(0, ROWS)[:, None]
        is_row = group < GROUPS
        row = token * GROUPS + group
    else:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        is_row = row < num_rows
        token, group = (row // GROUPS).to(tl.int64), row % GROUPS
    d = tl.arange(0, BLOCK_D)[None, :]
    is_here = is_row & (d < D)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + group * WEIGHT_STRIDE + d, mask=is_here, other=0.0)
    wait_for_previous()
    x = tl.load(x_ptr + token * stride_x + group * D + d, mask=is_here, other=0.0)
    gate = tl.load(gate_ptr + token * stride_gate + group * D + d, mask=is_here, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate)
    if not SIGMOID:
        factor *= gate
    wide = x.to(tl.float32)
    if GATE_FIRST:
        wide *= factor
    y, largest = wide, None
    if weight_ptr is not None:
        weighted = wide * weight
        if GATE_FIRST and ROWS == 1 and GROUP == 0 and values_ptr is not None:
            squares, largest = tl.reduce((wide * wide, tl.abs(weighted)), 1, sum_and_largest)
        else:
            squares = tl.sum(wide * wide, 1)
        norm = tl.rsqrt(squares / D + eps)
        y = weighted * norm[:, None]
        if largest is not None:
            largest = (largest * norm).to(x.dtype).to(tl.float32)  # that of y: rounding keeps the order
    if not GATE_FIRST:
        y *= factor
    y = y.to(x.dtype)
    if out_ptr is not None:
        tl.store(out_ptr + row.to(tl.int64) * D + d, y, mask=is_here)
    if values_ptr is not None:
        store_fp8_row(y.to(tl.float32), values_ptr, scale_ptr, stride_scale, token, GROUPS, D, BLOCK_D, GROUP, largest)


class _Form(NamedTuple):
    """The kernel's constants for groups of D values, `groups` of them in a token."""

    groups: int
    D: int
    weight_stride: int
    gate_first: bool
    sigmoid: bool


def gate_then_norm_triton(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, gate, weight, eps, _grouped(x, num_groups), out)
    return out


def gate_then_norm_fp8_triton(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int, fmt: Fp8Format
) -> Fp8Rows:
    return _launch_fp8(x, gate, weight, eps, _grouped(x, num_groups), fmt)


def _grouped(x: Tensor, num_groups: int) -> _Form:
    group = x.shape[1] // num_groups
    return _Form(num_groups, group, group, gate_first=True, sigmoid=False)


def norm_then_gate_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, gate, weight, eps, _by_head(x, gate, sigmoid), out)
    return out


def norm_then_gate_fp8_triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, fmt: Fp8Format, sigmoid: bool = False
) -> Fp8Rows:
    return _launch_fp8(x, gate, weight, eps, _by_head(x, gate, sigmoid), fmt)


def _by_head(x: Tensor, gate: Tensor, sigmoid: bool) -> _Form:
    _, H, D = x.shape
    if x.stride(1) != D or gate.stride(1) != D:
        raise ValueError(f"heads of x {x.stride()} and gate {gate.stride()} do not lie side by side")
    return _Form(H, D, 0, gate_first=False, sigmoid=sigmoid)


def _launch_fp8(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, form: _Form, fmt: Fp8Format) -> Fp8Rows:
    T, width = len(x), form.groups * form.D
    if not groups_fit(form.groups, form.D, next_power_of_2(form.D), fmt):
        out = torch.empty((T, width), dtype=x.dtype, device=x.device)
        _launch(x, gate, weight, eps, form, out)
        return quantise_rows(out, fmt)
    rows = empty_rows(T, width, fmt, x.dtype, x.device)
    _launch(x, gate, weight, eps, form, rows.plain, rows, fmt.group)
    return rows


def _launch(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    form: _Form,
    out: Tensor | None,
    quantised: Fp8Rows | None = None,
    group: int = 0,
) -> None:
    if x.stride(-1) != 1 or gate.stride(-1) != 1 or not (weight is None or weight.is_contiguous()):
        raise ValueError("values of one row must lie side by side, and weights have no gaps")
    num_rows = len(x) * form.groups
    values = scales = None
    if quantised is None:
        rows, num_warps = gated_tile(num_rows, form.D)
    else:
        values, scales = quantised.values, quantised.scales
        rows, num_warps = token_tile(form.groups, form.D)
    if num_rows:
        _gated_norm_kernel[(cdiv(num_rows, rows) if quantised is None else len(x),)](
            x, gate, weight, out, values, scales,
            num_rows, x.stride(0), gate.stride(0), 0 if scales is None else scales.stride(1), eps,
            GROUPS=form.groups, D=form.D, WEIGHT_STRIDE=form.weight_stride, GATE_FIRST=form.gate_first,
            SIGMOID=form.sigmoid, ROWS=rows, BLOCK_D=next_power_of_2(form.D), GROUP=group,
            num_warps=num_warps, **OVERLAPPED,
        )  # fmt: skip


def gated_tile(num_rows: int, D: int) -> tuple[int, int]:
    """Rows a program, and its warps: the fastest on an H200 at 1 to 8,192 tokens of 4,096 values. A row of 4,096 takes
    16 warps; rows of 128 go by fours where they are few, by eights where many."""
    width = next_power_of_2(D)
    values = 512 if num_rows <= 64 * 32 else 1024
    return max(1, values // width), 4 if width <= 1024 else 16


def token_tile(groups: int, D: int) -> tuple[int, int]:
    """Rows of one token, all in one program that writes FP8, and its warps: 8 values a thread of 4,096, as above."""
    rows = next_power_of_2(groups)
    return rows, min(16, max(4, rows * next_power_of_2(D) // 256))
