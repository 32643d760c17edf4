"""e^x by way of 2^x, which is one instruction of a GPU: exp(x) = exp2(x * LOG2_E)."""

import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
