"""Logits of ids that a grammar does not allow become -inf.

Shapes    logits [N, V] float32, changed in place; masks [K, W] int32, W = ceil(V / 32): bit i of word w is set if id
          32 * w + i is allowed; rows_K [K] int64: the row of logits of each mask
Contract  rows_K are unique; logits are below inf
Numerics  bit-exact
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.sizes import cdiv

_ADDED = torch.zeros(256, 8).masked_fill_((torch.arange(256)[:, None] >> torch.arange(8) & 1) == 0, -torch.inf)
"""Numbers to add to the logits of eight ids, by their bits."""


def mask_tokens(logits: Tensor, masks: Tensor, rows_K: Tensor) -> None:
    expected = (len(rows_K), cdiv(logits.shape[1], 32))
    if logits.dtype != torch.float32 or masks.dtype != torch.int32 or masks.shape != expected:
        raise ValueError(
            f"logits {tuple(logits.shape)} {logits.dtype}, masks {tuple(masks.shape)} {masks.dtype} and {len(rows_K)} "
            "rows disagree"
        )
    (mask_tokens_triton if runs_triton(logits) else mask_tokens_torch)(logits, masks, rows_K)


def mask_tokens_torch(logits: Tensor, masks: Tensor, rows_K: Tensor) -> None:
    # A row at a time: temporaries of more than a few MiB would be fresh pages each time. And a byte's eight logits at
    # once: filling by single bits takes 1 ms instead of 0.14 for 151,936 logits.
    added = _ADDED.to(logits.device)
    for row, mask in zip(rows_K.tolist(), masks, strict=True):
        logits[row] += added.index_select(0, mask.view(torch.uint8).int()).view(-1)[: logits.shape[1]]


@triton.jit
def _mask_tokens_kernel(logits_ptr, masks_ptr, rows_ptr, V, W, stride_logits, BLOCK: tl.constexpr):
    k = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(masks_ptr + k.to(tl.int64) * W + v // 32, mask=v < V, other=0)
    is_refused = (word >> (v % 32) & 1) == 0
    x_ptr = logits_ptr + tl.load(rows_ptr + k) * stride_logits + v
    tl.store(x_ptr, tl.full([BLOCK], float("-inf"), tl.float32), mask=is_refused & (v < V))


def mask_tokens_triton(logits: Tensor, masks: Tensor, rows_K: Tensor, block: int = 2048) -> None:
    K, V = len(rows_K), logits.shape[1]
    if logits.stride(1) != 1 or not masks.is_contiguous():
        raise ValueError(
            f"logits have strides {logits.stride()} and masks {masks.stride()}: rows must be contiguous, masks without "
            "gaps"
        )
    if K:
        _mask_tokens_kernel[(K, cdiv(V, block))](
            logits, masks, rows_K, V, masks.shape[1], logits.stride(0), BLOCK=block
        )
