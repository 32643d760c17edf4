"""Programmatic dependent launch: a kernel's blocks come up while the kernel before it on the stream still ends.

    @triton.jit
    def _kernel(...):
        let_next_start()          # first: the next kernel may take the room that this one leaves
        ...                       # what no kernel before it writes: indices, weights
        fetch(weights, 64)        # what is far away, even if they may still write it
        wait_for_previous()       # in every program, before it reads what others wrote, and before it writes or returns
        ...

    _kernel[grid](..., **OVERLAPPED)

Contract  every program of an overlapped kernel waits, even one with nothing to do: a kernel is done only when all its
          programs are, and whoever waits for it relies on all kernels before it being done, too. What is read before
          the wait comes from before the last kernel that is not overlapped, or from no kernel: weights, and the index
          tensors of a step, which are made before its embeddings are looked up
Source    CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; PTX `griddepcontrol`
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from headrace.kernels.lib.dispatch import UPCAST_DOT

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


@triton.jit
def fetch(pointers, num_bytes: tl.constexpr):
    """Starts so many bytes at each pointer, multiples of 16, on their way into the second-level cache. They are not
    read yet: whoever writes them meanwhile writes them there."""
    if HAS_IT:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2;\n mov.b32 $0, 0;",
            "=r,l,r",
            [pointers.to(tl.int64), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
