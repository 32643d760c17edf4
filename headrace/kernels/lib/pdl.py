"""Programmatic dependent launch: a kernel's blocks start while the kernel before it on the stream still ends.

    @triton.jit
    def _kernel(...):
        let_next_start()          # first: the next kernel may use the resources that this one leaves free
        ...                       # reads what no earlier kernel writes: indices, weights
        fetch(weights, 64)        # into the second-level cache, even if earlier kernels may still write it
        wait_for_previous()       # in every program, before it reads earlier kernels' results, writes or returns
        ...

    _kernel[grid](..., **OVERLAPPED)

Contract  every program of an overlapped kernel waits, even one with nothing to do: the wait of the next kernel is for
          this one alone, and must imply that all earlier kernels have ended. What is read before the wait was written
          before the last ordinary launch, or by no kernel: weights (a head that drafts changes by ordinary launches),
          and the index tensors of a step, which are made before its embedding (dense/embed.py)
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
"""Launch options of a kernel that calls wait_for_previous."""


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
    """Prefetches `num_bytes`, a multiple of 16, at each pointer into the second-level cache. Writes that come later are
    seen: they go through that cache."""
    if HAS_IT:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2;\n mov.b32 $0, 0;",
            "=r,l,r",
            [pointers.to(tl.int64), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
