"""Parameters of a gated-delta-net layer's value heads, and the gates that they make of the projected a and b.

    g = softplus(a + dt_bias) A        beta = beta_scale sigmoid(b)

Shapes    A, dt_bias [Hv] float32, contiguous; a, b [T, Hv], any stride over rows
Contract  beta_scale is 1, or 2: what a key finds in the state may then change its sign, but never grows. A is
          negative, so that the log decay g is, too; the kernels take a and b and compute the gates where they read
          them
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
    beta_scale: float = 1.0

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """g and beta, [T, Hv] float32."""
        beta = torch.sigmoid(b.float())
        if self.beta_scale != 1:
            beta *= self.beta_scale
        return F.softplus(a.float() + self.dt_bias).mul_(self.A), beta


@triton.jit
def log_decay(a, bias, A):
    return softplus(a.to(tl.float32) + bias) * A
