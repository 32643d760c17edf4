"""Choice of an operation's implementation: its torch reference, its Triton kernel, or its Hopper variant.

Triton's kernels run on GPUs, the references elsewhere. A Hopper variant, written in Gluon, takes what it fits
(`fits_hopper` beside it) on Hopper GPUs, unless the process has switched all of them off.

Without a GPU the Triton kernels run in Triton's interpreter, for their tests alone: `TRITON_INTERPRET=1` must be in
the environment before the first of them is imported (tests/conftest.py sets it). The interpreter holds bfloat16 as
integers and `tl.dot` multiplies those: kernels cast the operands to float32 there.
"""

import os
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

UPCAST_DOT = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Cast `tl.dot`'s operands to float32 first: true in the interpreter."""

_hopper_kernels = True


def runs_triton(x: Tensor) -> bool:
    """True if operations on `x` go to their Triton kernels."""
    return x.is_cuda


def set_hopper_kernels(enabled: bool) -> None:
    """Lets this process use the Hopper variants, the default, or switches all of them off.

    Set it before the first kernel runs: warm-up compiles, and graphs capture, what is chosen at that time.
    """
    global _hopper_kernels
    _hopper_kernels = enabled


def runs_hopper(x: Tensor) -> bool:
    """True if operations on `x` may go to their Hopper variants: by the process's setting, the GPU and the dtype."""
    return _hopper_kernels and x.dtype in (torch.bfloat16, torch.float16) and is_hopper(x.device)


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
