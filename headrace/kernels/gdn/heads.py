"""Parameters of a gated-delta-net layer's value heads, and the gates that they make of the projected a and b.

    g = softplus(a + dt_bias) A        beta = sigmoid(b)

Shapes    A, dt_bias [Hv] float32, contiguous; a, b [T, Hv], any stride over rows
Contract  A is negative, so that the log decay g is, too; the kernels take a and b and compute the gates where they
          read them
Numerics  float32
Source    Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks"
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.exponentials import softplus


@dataclass(frozen=True)
class GdnHeads:
    A: Tensor
    dt_bias: Tensor

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """g and beta, [T, Hv] float32."""
        return F.softplus(a.float() + self.dt_bias).mul_(self.A), torch.sigmoid(b.float())


@triton.jit
def log_decay(a, bias, A):
    return softplus(a.to(tl.float32) + bias) * A
