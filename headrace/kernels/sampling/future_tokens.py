"""Fields of a captured decode step as its kernels read them, with the tokens that the host does not know yet.

    out[f, n]      = fields[f, n]
    out[token, n]  = drawn[fields[source, n]] where fields[source, n] >= 0

Shapes    fields [F, N] int32, any stride over rows; drawn [at least the largest source + 1] int64, no gaps; `token` and
          `source` are rows of fields; returns [F, N] int64
Contract  an ordinary launch (pdl.py)
Source    torch takes five small kernels for it, at the head of every step; the idea is SGLang's future tokens
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.sizes import cdiv


def resolve_future_tokens(fields: Tensor, drawn: Tensor, *, token: int, source: int) -> Tensor:
    if fields.dim() != 2 or fields.stride(1) != 1 or (fields.dtype, drawn.dtype) != (torch.int32, torch.int64):
        raise ValueError(
            f"fields {tuple(fields.shape)} {fields.stride()} {fields.dtype} are not int32 in rows without gaps, or "
            f"drawn is {drawn.dtype}"
        )
    return (resolve_future_tokens_triton if runs_triton(fields) else resolve_future_tokens_torch)(
        fields, drawn, token, source
    )


def resolve_future_tokens_torch(fields: Tensor, drawn: Tensor, token: int, source: int) -> Tensor:
    out = fields.long()
    drawn_N = drawn.index_select(0, out[source].clamp(min=0))
    out[token] = torch.where(out[source] >= 0, drawn_N, out[token])
    return out


@triton.jit(do_not_specialize=["N"])
def _future_tokens_kernel(
    fields_ptr, drawn_ptr, out_ptr, N, stride_fields, TOKEN: tl.constexpr, SOURCE: tl.constexpr, BLOCK: tl.constexpr
):
    field, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = n < N
    value = tl.load(fields_ptr + field * stride_fields + n, mask=is_here, other=0).to(tl.int64)
    # The interpreter refuses a mask `is_here & (field == TOKEN)`.
    source = tl.load(fields_ptr + SOURCE * stride_fields + n, mask=n < tl.where(field == TOKEN, N, 0), other=-1)
    drawn = tl.load(drawn_ptr + tl.maximum(source, 0), mask=source >= 0, other=0)
    tl.store(out_ptr + field * N + n, tl.where(source >= 0, drawn, value), mask=is_here)


def resolve_future_tokens_triton(fields: Tensor, drawn: Tensor, token: int, source: int) -> Tensor:
    F, N = fields.shape
    out = torch.empty((F, N), dtype=torch.int64, device=fields.device)
    if N:
        _future_tokens_kernel[(F, cdiv(N, 128))](
            fields, drawn, out, N, fields.stride(0), TOKEN=int(token), SOURCE=int(source), BLOCK=128, num_warps=4
        )
    return out
