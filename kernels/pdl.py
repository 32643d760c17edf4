"""Programmatic dependent launch: a kernel's blocks come up while the kernel before it on the stream still ends.

    @triton.jit
    def _kernel(...):
        let_next_start()          # first: the next kernel may take the room that this one leaves
        ...                       # what no kernel before it writes: indices, weights
        wait_for_previous()       # in every program, before it reads what others wrote, and before it writes or returns
        ...

    _kernel[grid](..., **OVERLAPPED)

Contract  every program of an overlapped kernel waits, even one with nothing to do: a kernel is done only when all its
          programs are, and whoever waits for it relies on all kernels before it being done, too
Source    CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; PTX `griddepcontrol`
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kernels.dispatch import UPCAST_DOT

_HAS_IT = not UPCAST_DOT.value and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0))
HAS_IT = tl.constexpr(_HAS_IT)

OVERLAPPED: dict[str, Any] = {"launch_pdl": True} if _HAS_IT else {}
"""Launch options of a kernel that waits."""


@triton.jit
def wait_for_previous():
    if HAS_IT:
        cuda.gdc_wait()


@triton.jit
def let_next_start():
    if HAS_IT:
        cuda.gdc_launch_dependents()
