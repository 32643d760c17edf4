"""Copies of scattered pool rows (blocks, states) to and from one contiguous staging buffer of bytes.

    gather    staging[i * E : (i + 1) * E] = pool[rows[i]]          scatter    the other way

Shapes    pool [P, E] uint8, contiguous: P rows of E bytes; rows [N] int64; staging [N * E] uint8, contiguous
Contract  rows in range; for scatter also unique; staging and pool do not alias; N = 0 is a no-op
Numerics  bit-exact
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.launch import launch
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def gather_rows(pool: Tensor, rows: Tensor, staging: Tensor) -> None:
    _check(pool, rows, staging)
    (gather_rows_triton if runs_triton(pool) else gather_rows_torch)(pool, rows, staging)


def scatter_rows(pool: Tensor, rows: Tensor, staging: Tensor) -> None:
    _check(pool, rows, staging)
    (scatter_rows_triton if runs_triton(pool) else scatter_rows_torch)(pool, rows, staging)


def _check(pool: Tensor, rows: Tensor, staging: Tensor) -> None:
    expected = rows.shape[0] * pool.shape[1]
    if staging.dtype != torch.uint8 or staging.dim() != 1 or staging.nbytes != expected:
        raise ValueError(f"staging is {tuple(staging.shape)} {staging.dtype}, not [{expected}] uint8")
    if not (pool.is_contiguous() and staging.is_contiguous()):
        raise ValueError(f"pool strides {pool.stride()}, staging strides {staging.stride()}: both must be contiguous")


def gather_rows_torch(pool: Tensor, rows: Tensor, staging: Tensor) -> None:
    torch.index_select(pool, 0, rows, out=staging.view(len(rows), pool.shape[1]))


def scatter_rows_torch(pool: Tensor, rows: Tensor, staging: Tensor) -> None:
    # Row by row: index_copy_ goes byte by byte, ten times slower.
    for row, data in zip(rows.tolist(), staging.view(len(rows), pool.shape[1]), strict=True):
        pool[row].copy_(data)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _copy_rows_kernel(
    pool_ptr,
    rows_ptr,
    staging_ptr,
    WORDS_A_ROW: tl.constexpr,
    TILE: tl.constexpr,
    TO_POOL: tl.constexpr,
):
    """A program copies TILE words of one row."""
    i = tl.program_id(0) // tl.cdiv(WORDS_A_ROW, TILE)
    word = tl.program_id(0) % tl.cdiv(WORDS_A_ROW, TILE) * TILE + tl.arange(0, TILE)
    in_row = word < WORDS_A_ROW
    in_pool = pool_ptr + tl.load(rows_ptr + i) * WORDS_A_ROW + word
    in_staging = staging_ptr + i.to(tl.int64) * WORDS_A_ROW + word
    if TO_POOL:
        tl.store(in_pool, tl.load(in_staging, mask=in_row), mask=in_row)
    else:
        tl.store(in_staging, tl.load(in_pool, mask=in_row), mask=in_row)


def gather_rows_triton(pool: Tensor, rows: Tensor, staging: Tensor) -> None:
    _copy_rows(pool, rows, staging, to_pool=False)


def scatter_rows_triton(pool: Tensor, rows: Tensor, staging: Tensor) -> None:
    _copy_rows(pool, rows, staging, to_pool=True)


def _copy_rows(pool: Tensor, rows: Tensor, staging: Tensor, to_pool: bool) -> None:
    # The widest words that divide every row and both buffers: eight bytes, two of them a thread at a time, unless the
    # row length or an address is odd.
    row_bytes = pool.shape[1]
    word_bytes = math.gcd(8, row_bytes, pool.data_ptr(), staging.data_ptr())
    if not staging.nbytes:
        return
    words_a_row = row_bytes // word_bytes
    tile, num_warps = launch_shape(words_a_row)
    words = WORDS[word_bytes]
    launch(
        _copy_rows_kernel,
        rows.shape[0] * cdiv(words_a_row, tile),
        (pool.view(words), rows, staging.view(words)),
        (),
        (words_a_row, tile, to_pool),
        num_warps=num_warps,
    )


def launch_shape(words_a_row: int) -> tuple[int, int]:
    """Words that a program copies, and its warps: 8 KiB by four warps, with four 16-byte loads a thread in flight."""
    return min(1024, next_power_of_2(words_a_row)), 4
