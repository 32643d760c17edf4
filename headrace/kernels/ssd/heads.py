"""Parameters of a Mamba2 layer's heads, and the time steps that they make of the projected ones.

    dt = clamp(softplus(raw + dt_bias), dt_min, dt_max)

Shapes    A, D, dt_bias [H] float32, contiguous; raw [T, H], any stride over rows
Contract  A is negative; SSD kernels take raw time steps and compute dt where they read them
Numerics  float32
Source    Dao & Gu 2024, "Transformers are SSMs"
"""

from dataclasses import dataclass

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.exponentials import softplus


@dataclass(frozen=True)
class SsdHeads:
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    dt_min: float = 0.0
    dt_max: float = float("inf")

    def time_steps(self, raw: Tensor) -> Tensor:
        """[T, H] float32."""
        dt = F.softplus(raw.float() + self.dt_bias)
        if (self.dt_min, self.dt_max) != (0.0, float("inf")):
            dt.clamp_(self.dt_min, self.dt_max)
        return dt


@triton.jit
def time_step(raw, bias, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr):
    return tl.minimum(tl.maximum(softplus(raw.to(tl.float32) + bias), DT_MIN), DT_MAX)
