"""RMS normalisation beside a SiLU gate, in the two orders that mixers use.

    gate_then_norm   norm_group(x * silu(gate)) * weight     Mamba2: groups of D / num_groups values
    norm_then_gate   norm(x) * weight * silu(gate)           gated delta net: each head on its own

Shapes    gate_then_norm: x, gate [T, D]; weight [D].   norm_then_gate: x, gate [T, H, D]; weight [D].
Contract  the gate may have any row stride; num_groups divides D
Numerics  float32 inside, the result in x's dtype
Source    Dao & Gu 2024 (Mamba2's grouped norm); Yang et al. 2024, "Gated Delta Networks"
"""

import torch.nn.functional as F
from torch import Tensor

from kernels.rms_norm import inverse_rms, rms_norm


def gate_then_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    if x.shape != gate.shape or x.shape[-1] != weight.shape[0] or x.shape[-1] % num_groups:
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)} disagree")
    return gate_then_norm_torch(x, gate, weight, eps, num_groups)


def gate_then_norm_torch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    T, D = x.shape
    gated = F.silu(gate.float()).mul_(x).view(T, num_groups, D // num_groups)
    return gated.mul_(inverse_rms(gated, eps)).view(T, D).mul_(weight).to(x.dtype)


def norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.shape != gate.shape or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)} disagree")
    return norm_then_gate_torch(x, gate, weight, eps)


def norm_then_gate_torch(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.float(), weight, eps).mul_(F.silu(gate.float())).to(x.dtype)
