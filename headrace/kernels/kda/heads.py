"""Parameters of a Kimi-delta-attention layer's heads, and the gates that they make of the projected f and b.

    g = softplus(f + dt_bias) A        beta = sigmoid(b)

Shapes    A [H], dt_bias [H, K] float32, contiguous; f [T, H, K], b [T, H], any stride over rows
Contract  A is negative, so that the log decay g of each key channel is, too; the kernels take f and b and compute the
          gates where they read them
Numerics  float32
Source    Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture"
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class KdaHeads:
    A: Tensor
    dt_bias: Tensor

    def gates(self, f: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """g [T, H, K] and beta [T, H], float32."""
        return F.softplus(f.float() + self.dt_bias).mul_(self.A[:, None]), torch.sigmoid(b.float())
