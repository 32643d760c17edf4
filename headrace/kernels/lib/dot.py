"""Matrix product inside Triton kernels: float32 sums, float32 operands in full precision, correct when interpreted."""

import torch
import triton
import triton.language as tl

from headrace.kernels.lib.dispatch import UPCAST_DOT
from headrace.kernels.lib.sizes import next_power_of_2


@triton.jit
def dot(a, b, acc=None):
    if UPCAST_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def dot_block(size: int) -> int:
    """Side of a tile for `size` rows or columns: a power of two, at least the 16 that a product takes."""
    return max(16, next_power_of_2(size))


def swizzle_block(size: int, dtype: torch.dtype) -> int:
    """`dot_block` for the columns of several operands that the matrix units read from shared memory.

    64 columns of two bytes fill a whole swizzle of shared memory. Where tiles of one kernel have different swizzles,
    ptxas of CUDA 12.8 takes descriptors' addresses from wrong registers: sums are wrong from row 16 on.
    """
    return max(dot_block(size), 16 if dtype == torch.float32 else 64)
