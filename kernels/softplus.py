"""softplus(x) = log(1 + e^x) inside Triton kernels.

Numerics  float32, exact to a few units in the last place for negative x, too, where the result is e^x almost: time
          steps and decays of a recurrence are such small numbers. Elsewhere `torch.nn.functional.softplus`
Source    Kahan's log1p: log(u) z / (u - 1) with u = 1 + z rounded, for log's argument and divisor err alike
"""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    is_lost = rounded == 1.0
    log1p = tl.where(is_lost, small, tl.log(rounded) * (small / tl.where(is_lost, 1.0, rounded - 1.0)))
    return tl.maximum(x, 0.0) + log1p
