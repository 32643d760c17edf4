"""Tokens that a captured decode step reads: known ones from the host, future ones from the draws of the step before.

    token_n = drawn[source_n] if source_n >= 0 else known_n

Shapes    known, source [N] int64, any stride; drawn [at least max(source) + 1] int64, no gaps; returns [N] int64
Source    torch takes four small kernels for it, at the head of every step; the idea is SGLang's future tokens
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.sizes import cdiv


def resolve_future_tokens(known: Tensor, source: Tensor, drawn: Tensor) -> Tensor:
    if known.shape != source.shape or known.dim() != 1 or {known.dtype, source.dtype, drawn.dtype} != {torch.int64}:
        raise ValueError(
            f"known {tuple(known.shape)} {known.dtype} and source {tuple(source.shape)} {source.dtype} disagree"
        )
    resolve = resolve_future_tokens_triton if runs_triton(known) else resolve_future_tokens_torch
    return resolve(known, source, drawn)


def resolve_future_tokens_torch(known: Tensor, source: Tensor, drawn: Tensor) -> Tensor:
    return torch.where(source >= 0, drawn.index_select(0, source.clamp(min=0)), known)


@triton.jit(do_not_specialize=["N"])
def _future_tokens_kernel(
    known_ptr, source_ptr, drawn_ptr, out_ptr, N, stride_known, stride_source, BLOCK: tl.constexpr
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = n < N
    source = tl.load(source_ptr + n * stride_source, mask=is_here, other=-1)
    drawn = tl.load(drawn_ptr + tl.maximum(source, 0), mask=source >= 0, other=0)
    known = tl.load(known_ptr + n * stride_known, mask=is_here, other=0)
    tl.store(out_ptr + n, tl.where(source >= 0, drawn, known), mask=is_here)


def resolve_future_tokens_triton(known: Tensor, source: Tensor, drawn: Tensor) -> Tensor:
    N = len(known)
    out = torch.empty(N, dtype=torch.int64, device=known.device)
    if N:
        _future_tokens_kernel[(cdiv(N, 128),)](
            known, source, drawn, out, N, known.stride(0), source.stride(0), BLOCK=128, num_warps=4
        )
    return out
