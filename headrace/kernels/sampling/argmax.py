"""Index of each row's largest value, or what stands at that index: the token of a greedy draw.

Shapes    logits [N, V] float32 or of 16 bits, any stride over rows; out int64 [N], any stride; ids int64 [V]
Contract  the first of equal values; infinities may occur. A row with a NaN has NO_TOKEN
Source    one program for each chunk of a row, then the best of the chunks: one program a row would read a small
          batch's logits through too few multiprocessors
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

DTYPES = torch.float32, torch.float16, torch.bfloat16
NO_TOKEN = -1
"""Stands for a token where a row of logits has a NaN; no vocabulary has it."""


def argmax(logits: Tensor, out: Tensor, ids: Tensor | None = None) -> None:
    """Writes the index to `out`, or with `ids` the one there."""
    if logits.dtype not in DTYPES or logits.dim() != 2 or out.dtype != torch.int64 or out.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype} and out {tuple(out.shape)} {out.dtype} disagree")
    (argmax_triton if runs_triton(logits) else argmax_torch)(logits, out, ids)


def argmax_torch(logits: Tensor, out: Tensor, ids: Tensor | None = None) -> None:
    best = logits.argmax(dim=-1)  # to torch NaN is the largest of all
    has_nan = logits.gather(1, best[:, None])[:, 0].isnan()
    out.copy_((best if ids is None else ids[best]).masked_fill_(has_nan, NO_TOKEN))


@triton.jit
def _chunk_kernel(logits_ptr, best_ptr, place_ptr, V, stride_logits, LARGEST: tl.constexpr, CHUNK: tl.constexpr):
    """Program (row, chunk): the largest value of one chunk, infinity for a NaN, and its index in the row."""
    let_next_start()
    wait_for_previous()
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * stride_logits
    logit = tl.load(row_ptr + place, mask=place < V, other=float("-inf")).to(tl.float32)
    # NaN is neither more nor less than a number: as infinity it is the largest, and nothing else is infinite.
    logit = tl.where(logit != logit, float("inf"), tl.minimum(logit, LARGEST))
    best, found = tl.max(logit, 0, return_indices=True)
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, best)
    tl.store(place_ptr + at, tl.program_id(1) * CHUNK + found)


@triton.jit
def _best_kernel(
    best_ptr, place_ptr, ids_ptr, out_ptr, stride_out, chunks, NO_TOKEN: tl.constexpr, BLOCK: tl.constexpr
):
    let_next_start()
    wait_for_previous()
    row, chunk = tl.program_id(0), tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    largest, found = tl.max(best, 0, return_indices=True)
    place = tl.load(place_ptr + row * chunks + found)
    place = place.to(tl.int64)
    if ids_ptr is not None:
        place = tl.load(ids_ptr + place)
    tl.store(out_ptr + row.to(tl.int64) * stride_out, tl.where(largest == float("inf"), NO_TOKEN, place))


def argmax_triton(logits: Tensor, out: Tensor, ids: Tensor | None = None, chunk: int = 4096) -> None:
    N, V = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.stride()}: those of one row must be contiguous")
    if not N:
        return
    chunks = cdiv(V, chunk)
    best = torch.empty((N, chunks), dtype=torch.float32, device=logits.device)
    place = torch.empty((N, chunks), dtype=torch.int32, device=logits.device)
    largest = torch.finfo(torch.float32).max
    _chunk_kernel[(N, chunks)](logits, best, place, V, logits.stride(0), LARGEST=largest, CHUNK=chunk, **OVERLAPPED)
    _best_kernel[(N,)](
        best, place, ids, out, out.stride(0), chunks, NO_TOKEN=NO_TOKEN, BLOCK=next_power_of_2(chunks), num_warps=1,
        **OVERLAPPED,
    )  # fmt: skip
