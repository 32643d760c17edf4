"""A kernel for the tests of `compiled.py`."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(src_ptr, dst_ptr, length, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst_ptr + place, tl.load(src_ptr + place, mask=place < length), mask=place < length)
