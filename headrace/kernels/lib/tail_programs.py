"""The parts that Triton kernels over tails share."""

import triton
import triton.language as tl

from headrace.kernels.lib.tails import TailField

NUM_FIELDS = tl.constexpr(len(TailField))
AT_ONCE = tl.constexpr(4)
"""Entries whose bytes a program that writes a state waits for together."""


@triton.jit
def load_tail_fields(fields_ptr, sequence):
    """A sequence's numbers in the order of `TailField`."""
    fields_ptr += sequence * NUM_FIELDS
    src, dst, row = tl.load(fields_ptr), tl.load(fields_ptr + 1), tl.load(fields_ptr + 2)
    start, kept, written = tl.load(fields_ptr + 3), tl.load(fields_ptr + 4), tl.load(fields_ptr + 5)
    return src, dst, row, start, kept, written
