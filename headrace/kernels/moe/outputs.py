"""The sum of a token's experts, and of an expert beside them that every token goes through.

    y_t = sum_j outputs[t, j] + gate_t * shared_t             gate_t = sigmoid(x_t . gate), or 1

    outputs[t, j] = weight[t, j] * rows[place[t, j]]          if they are `Placed`

Shapes    outputs [T, k, D], or rows [R, D] with place and weight [T, k]; shared [T, D] in their dtype, or parts
          [S, T, D] in float32 that sum to it; x [T, I], gate [1, I]; returns y [T, D]
Numerics  Triton: in float32, rounded once. torch: each step in the dtype of outputs
Source    the gate: Qwen team 2024, "Qwen1.5-MoE"
"""

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import next_power_of_2


class Placed(NamedTuple):
    """Experts' outputs where grouped products left them, without the router's weights."""

    rows: Tensor  # [R, D], dense
    place: Tensor  # [T, k] int32: each entry's row
    weight: Tensor  # [T, k]

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.place.shape, self.rows.shape[1]


Outputs: TypeAlias = Tensor | Placed


class Shared(NamedTuple):
    """An expert's output for every token, and what its gate is computed from; without a gate it counts once."""

    output: Tensor  # [T, D] or parts [S, T, D]
    x: Tensor
    gate: Tensor | None


def sum_outputs(outputs: Outputs, shared: Shared | None = None) -> Tensor:
    """y [T, D]. Raises ValueError if sizes disagree."""
    if shared is not None:
        (T, _, D), (output, x, gate) = outputs.shape, shared
        if output.shape[-2:] != (T, D) or (gate is not None and (gate.shape != (1, x.shape[1]) or len(x) != T)):
            given = f"outputs {tuple(outputs.shape)}, shared {tuple(output.shape)}, x {tuple(x.shape)}"
            raise ValueError(f"{given}, gate {None if gate is None else tuple(gate.shape)} disagree")
    if isinstance(outputs, Tensor) and shared is None and outputs.shape[1] == 1:
        return outputs[:, 0]
    runs = runs_triton(outputs.rows if isinstance(outputs, Placed) else outputs)
    return (sum_outputs_triton if runs else sum_outputs_torch)(outputs, shared)


def sum_outputs_torch(outputs: Outputs, shared: Shared | None) -> Tensor:
    if isinstance(outputs, Placed):
        rows, place, weight = outputs
        outputs = (rows[place.long()] * weight[..., None]).to(rows.dtype)
    routed = outputs.sum(1)
    if shared is None:
        return routed
    beside = shared.output if shared.output.dim() == 2 else shared.output.sum(0).to(outputs.dtype)
    return routed + (beside if shared.gate is None else beside * torch.sigmoid(F.linear(shared.x, shared.gate)))


@triton.jit(do_not_specialize=["T"])
def _sum_kernel(
    outputs_ptr, place_ptr, weight_ptr, shared_ptr, x_ptr, gate_ptr, out_ptr, T, stride_x,
    D: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, I: tl.constexpr,  # noqa: E741
    BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A token a program. PARTS = 0: nothing beside the experts; I = 0: no gate."""
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, BLOCK_I)
    if I:
        gate = tl.load(gate_ptr + i, mask=i < I, other=0.0).to(tl.float32)
    wait_for_previous()
    total = tl.zeros([BLOCK_D], tl.float32)
    if PARTS:
        for part in tl.static_range(PARTS):
            total += tl.load(shared_ptr + (part * T + token) * D + d, mask=d < D, other=0.0).to(tl.float32)
    if I:
        x = tl.load(x_ptr + token * stride_x + i, mask=i < I, other=0.0).to(tl.float32)
        total *= tl.sigmoid(tl.sum(x * gate, 0))
    for j in tl.static_range(K):
        if place_ptr is None:
            total += tl.load(outputs_ptr + (token * K + j) * D + d, mask=d < D, other=0.0).to(tl.float32)
        else:
            row = tl.load(place_ptr + token * K + j).to(tl.int64)
            weight = tl.load(weight_ptr + token * K + j).to(tl.float32)
            total += weight * tl.load(outputs_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


def sum_outputs_triton(outputs: Outputs, shared: Shared | None) -> Tensor:
    T, k, D = outputs.shape
    rows, place, weight = outputs if isinstance(outputs, Placed) else (outputs, None, None)
    beside, x, gate = shared or (None, None, None)
    stored = [each for each in (rows, place, weight, beside, gate) if each is not None]
    if any(not each.is_contiguous() for each in stored) or (gate is not None and x is not None and x.stride(1) != 1):
        raise ValueError("outputs, what is beside them and the gate must have no gaps, and x none in a row")
    num_in = 0 if gate is None else gate.shape[1]
    out = torch.empty((T, D), dtype=rows.dtype, device=rows.device)
    if T:
        _sum_kernel[(T,)](
            rows, place, weight, beside, x, gate, out, T, 0 if x is None else x.stride(0), D=D, K=k,
            PARTS=0 if beside is None else len(beside) if beside.dim() == 3 else 1, I=num_in,
            BLOCK_D=next_power_of_2(D), BLOCK_I=next_power_of_2(max(1, num_in)), num_warps=8, **OVERLAPPED,
        )  # fmt: skip
    return out
