"""Which implementation of an operation runs: the Triton kernel on a GPU, the torch reference elsewhere.

Without a GPU the kernels run in Triton's interpreter, for their tests alone: `TRITON_INTERPRET=1` must stand in
the environment before the first of them is imported (tests/conftest.py sees to it). The interpreter holds
bfloat16 as integers and `tl.dot` multiplies those: kernels cast the operands to float32 there.
"""

import os

import triton.language as tl
from torch import Tensor

UPCAST_DOT = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Cast `tl.dot`'s operands to float32 first: true in the interpreter."""


def runs_triton(x: Tensor) -> bool:
    """Whether operations on `x` go to their Triton kernels."""
    return x.is_cuda
