"""RMS normalisation with a gate, in the two orders that mixers use.

    gate_then_norm   norm_group(x * silu(gate)) * weight     Mamba2: groups of D / num_groups values
                                                             weight None: x * silu(gate), without a norm
    norm_then_gate   norm(x) * weight * silu(gate)           gated delta net: each head by itself
                                                             `sigmoid`, Kimi's: sigmoid(gate) instead of silu(gate)

Shapes    gate_then_norm: x, gate [T, D]; weight [D].   norm_then_gate: x, gate [T, H, D]; weight [D].
Contract  the gate may have any row stride; num_groups divides D
Numerics  float32 inside, the result in x's dtype
Source    Dao & Gu 2024 (Mamba2's grouped norm); Yang et al. 2024, "Gated Delta Networks"
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.rms_norm import inverse_rms, rms_norm_torch
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def gate_then_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int) -> Tensor:
    if x.shape != gate.shape or (weight is not None and weight.shape != x.shape[-1:]) or x.shape[-1] % num_groups:
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {shape} disagree")
    norm = gate_then_norm_triton if runs_triton(x) else gate_then_norm_torch
    return norm(x, gate, weight, eps, num_groups)


def gate_then_norm_torch(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int) -> Tensor:
    T, D = x.shape
    gated = F.silu(gate.float()).mul_(x)
    if weight is None:
        return gated.to(x.dtype)
    gated = gated.view(T, num_groups, D // num_groups)
    return gated.mul_(inverse_rms(gated, eps)).view(T, D).mul_(weight).to(x.dtype)


def norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    if x.shape != gate.shape or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)} disagree")
    return (norm_then_gate_triton if runs_triton(x) else norm_then_gate_torch)(x, gate, weight, eps, sigmoid)


def norm_then_gate_torch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    factor = gate.float().sigmoid() if sigmoid else F.silu(gate.float())
    return rms_norm_torch(x.float(), weight, eps).mul_(factor).to(x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x_ptr, gate_ptr,
    weight_ptr,  # None: no norm
    out_ptr, num_rows, stride_x, stride_gate, eps,
    GROUPS: tl.constexpr, D: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows are groups of D values, GROUPS side by side in each token; out has no gaps."""
    let_next_start()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    is_here = (row < num_rows) & (d < D)
    token, group = (row // GROUPS).to(tl.int64), row % GROUPS
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + group * WEIGHT_STRIDE + d, mask=d < D, other=0.0)
    wait_for_previous()
    x = tl.load(x_ptr + token * stride_x + group * D + d, mask=is_here, other=0.0)
    gate = tl.load(gate_ptr + token * stride_gate + group * D + d, mask=is_here, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate)
    if not SIGMOID:
        factor *= gate
    wide = x.to(tl.float32)
    if GATE_FIRST:
        wide *= factor
    y = wide
    if weight_ptr is not None:
        y = wide * tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None] * weight
    if not GATE_FIRST:
        y *= factor
    tl.store(out_ptr + row.to(tl.int64) * D + d, y.to(x.dtype), mask=is_here)


def gate_then_norm_triton(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int) -> Tensor:
    T, D = x.shape
    group = D // num_groups
    return _launch(x, gate, weight, eps, num_groups, group, group, gate_first=True, sigmoid=False).view(T, D)


def norm_then_gate_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    T, H, D = x.shape
    if x.stride(1) != D or gate.stride(1) != D:
        raise ValueError(f"heads of x {x.stride()} and gate {gate.stride()} do not lie side by side")
    return _launch(x, gate, weight, eps, H, D, 0, gate_first=False, sigmoid=sigmoid).view(T, H, D)


def _launch(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int,
    D: int,
    weight_stride: int,
    gate_first: bool,
    sigmoid: bool,
) -> Tensor:
    if x.stride(-1) != 1 or gate.stride(-1) != 1 or not (weight is None or weight.is_contiguous()):
        raise ValueError("values of one row must lie side by side, and weights have no gaps")
    num_rows = len(x) * groups
    out = torch.empty((num_rows, D), dtype=x.dtype, device=x.device)
    rows, num_warps = gated_tile(num_rows, D)
    if num_rows:
        _gated_norm_kernel[(cdiv(num_rows, rows),)](
            x, gate, weight, out, num_rows, x.stride(0), gate.stride(0), eps,
            GROUPS=groups, D=D, WEIGHT_STRIDE=weight_stride, GATE_FIRST=gate_first,
            SIGMOID=sigmoid, ROWS=rows, BLOCK_D=next_power_of_2(D), num_warps=num_warps, **OVERLAPPED,
        )  # fmt: skip
    return out


def gated_tile(num_rows: int, D: int) -> tuple[int, int]:
    """Rows a program, and its warps: the fastest on an H200 at 1 to 8,192 tokens of 4,096 values. A row of 4,096 takes
    16 warps; rows of 128 go by fours where they are few, by eights where many."""
    width = next_power_of_2(D)
    values = 512 if num_rows <= 64 * 32 else 1024
    return max(1, values // width), 4 if width <= 1024 else 16
