"""Matrix product inside Triton kernels: float32 sums, float32 operands in full precision, right in the interpreter."""

import triton
import triton.language as tl

from kernels.dispatch import UPCAST_DOT


@triton.jit
def dot(a, b, acc=None):
    if UPCAST_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
