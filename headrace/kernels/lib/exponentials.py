"""Exponentials inside Triton kernels: e^x through 2^x, and softplus(x) = log(1 + e^x).

Numerics  exp(x) = exp2(x * LOG2_E): 2^x is one instruction of a GPU. softplus is float32, exact to a few units in the
          last place for negative x, too, where the result is almost e^x: time steps and decays of a recurrence are
          such small numbers. The torch reference is `torch.nn.functional.softplus`
Source    log(1 + z) = 2 artanh(s) = 2 s (1 + s^2 / 3 + s^4 / 5 + ...) with s = z / (2 + z), for z = e^-|x|: s is at
          most 1/3, and the terms after the seventh add less than 2e-8 of the result. It takes a third of a logarithm's
          instructions, which programs of few elements spend on one number each
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)
    square = s * s
    series = 2.0 / 13.0
    for k in tl.static_range(6):
        series = series * square + 2.0 / (11 - 2 * k)
    return tl.maximum(x, 0.0) + s * series
