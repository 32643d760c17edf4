"""Token embedding: x_t = multiplier * embedding[token_t].

Shapes    tokens [T] int64, any stride; embedding [V, D], no gaps; returns [T, D]
Contract  token < V; NO_TOKEN (sampling/argmax.py) has the vector of 0. An ordinary launch, not an overlapped one
          (pdl.py): everything before it has ended when the layers' kernels start, so those may read a step's slots and
          tables without waiting
Numerics  the product in float32, rounded once
Source    one pass, the multiplier (Granite has one) included
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def embed(tokens: Tensor, embedding: Tensor, multiplier: float) -> Tensor:
    if tokens.dim() != 1 or tokens.dtype != torch.int64 or embedding.dim() != 2:
        raise ValueError(f"tokens {tuple(tokens.shape)} {tokens.dtype} and embedding {tuple(embedding.shape)} disagree")
    return (embed_triton if runs_triton(embedding) else embed_torch)(tokens, embedding, multiplier)


def embed_torch(tokens: Tensor, embedding: Tensor, multiplier: float) -> Tensor:
    x = F.embedding(tokens.clamp(min=0), embedding)
    return x if multiplier == 1.0 else x * multiplier


@triton.jit
def _embed_kernel(token_ptr, embedding_ptr, out_ptr, stride_token, multiplier, D: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.maximum(tl.load(token_ptr + row * stride_token), 0)
    value = tl.load(embedding_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32) * multiplier
    tl.store(out_ptr + row * D + d, value.to(out_ptr.dtype.element_ty), mask=d < D)


def embed_triton(tokens: Tensor, embedding: Tensor, multiplier: float) -> Tensor:
    T, D = len(tokens), embedding.shape[1]
    if not embedding.is_contiguous():
        raise ValueError(f"embedding has strides {embedding.stride()}: rows must lie behind each other")
    out = torch.empty((T, D), dtype=embedding.dtype, device=embedding.device)
    block = min(1024, next_power_of_2(D))
    if T:
        _embed_kernel[(T, cdiv(D, block))](
            tokens, embedding, out, tokens.stride(0), multiplier, D=D, BLOCK_D=block, num_warps=4
        )
    return out
