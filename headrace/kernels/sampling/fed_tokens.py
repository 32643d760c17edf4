"""The tokens that a captured decode step reads: from the host, or from what the step before drew on the device.

    token_n = drawn[feed_n] if feed_n >= 0 else known_n

Shapes    known, feed [N] int64, any stride; drawn [at least max(feed) + 1] int64, no gaps; returns [N] int64
Source    four small kernels at the head of every step otherwise
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.sizes import cdiv


def fed_tokens(known: Tensor, feed: Tensor, drawn: Tensor) -> Tensor:
    if known.shape != feed.shape or known.dim() != 1 or {known.dtype, feed.dtype, drawn.dtype} != {torch.int64}:
        raise ValueError(f"known {tuple(known.shape)} {known.dtype} and feed {tuple(feed.shape)} {feed.dtype} disagree")
    return (fed_tokens_triton if runs_triton(known) else fed_tokens_torch)(known, feed, drawn)


def fed_tokens_torch(known: Tensor, feed: Tensor, drawn: Tensor) -> Tensor:
    return torch.where(feed >= 0, drawn.index_select(0, feed.clamp(min=0)), known)


@triton.jit(do_not_specialize=["N"])
def _fed_tokens_kernel(
    known_ptr, feed_ptr, drawn_ptr, out_ptr, N, stride_known, stride_feed, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = n < N
    feed = tl.load(feed_ptr + n * stride_feed, mask=is_here, other=-1)
    drawn = tl.load(drawn_ptr + tl.maximum(feed, 0), mask=feed >= 0, other=0)
    known = tl.load(known_ptr + n * stride_known, mask=is_here, other=0)
    tl.store(out_ptr + n, tl.where(feed >= 0, drawn, known), mask=is_here)


def fed_tokens_triton(known: Tensor, feed: Tensor, drawn: Tensor) -> Tensor:
    N = len(known)
    out = torch.empty(N, dtype=torch.int64, device=known.device)
    if N:
        _fed_tokens_kernel[(cdiv(N, 128),)](
            known, feed, drawn, out, N, known.stride(0), feed.stride(0), BLOCK=128, num_warps=4
        )
    return out
