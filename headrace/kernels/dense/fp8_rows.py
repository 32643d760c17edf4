"""Rows of activations in FP8 for the products that read them, written by the operation that computes them.

    x, rows = add_rms_norm_rows(x, branch, alpha, weight, eps, in_proj.reads)
    y = in_proj(rows)

A launch of its own that only quantises takes 1.0 us at one row and 1.2 to 1.9 at 64, and reads and writes every row of
a prompt once more. Operations whose programs see whole rows (norms, gated norms, gates) have `*_rows` forms instead;
behind others the product quantises what it is given.

Shapes    rows [M, I]; values [P, I] and scales [P, G] in memory order [G, P], where P is M, or the next multiple of
          ALIGNED_ROWS where blocks have scales; G = 1 or ceil(I / BLOCK). What lies behind row M is undefined
Numerics  those of `quantise` (fp8.py) of the same rows in 16 bits: they are rounded to these first
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.fp8 import BLOCK, FP8, quantise_into, quantise_torch, store_fp8
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.sizes import cdiv

ALIGNED_ROWS = 4  # the library takes columns of scales that begin at multiples of 16 bytes


class Fp8Format(NamedTuple):
    """The FP8 that products read."""

    by_block: bool  # a scale for each BLOCK columns of a row; otherwise one for each row
    keeps_plain: bool = False  # others read the same rows in 16 bits

    @property
    def group(self) -> int:
        """`store_fp8_row`'s GROUP."""
        return BLOCK if self.by_block else 0


@dataclass(frozen=True)
class Fp8Rows:
    """M rows in FP8, and in 16 bits where something reads these."""

    values: Tensor  # [P, I]
    scales: Tensor  # [P, G]
    num_rows: int
    plain: Tensor | None = None  # [M, I]

    def __len__(self) -> int:
        return self.num_rows

    @property
    def width(self) -> int:
        return self.values.shape[1]

    def select(self, rows: Tensor) -> Fp8Rows:
        """The rows of these indices, int64, in their order."""
        padded = F.pad(rows, (0, _padding(len(rows), self.scales.shape[1] > 1)))
        values = self.values.view(torch.uint8).index_select(0, padded).view(FP8)
        plain = None if self.plain is None else self.plain.index_select(0, rows)
        return Fp8Rows(values, self.scales.t().index_select(1, padded).t(), len(rows), plain)


Rows: TypeAlias = Tensor | Fp8Rows


def plain_rows(x: Rows) -> Tensor:
    """The rows in 16 bits. Raises ValueError if nothing was to read them so."""
    if isinstance(x, Tensor):
        return x
    if x.plain is None:
        raise ValueError(f"{len(x)} rows of {x.width} are in FP8 alone: ask for a format that keeps_plain")
    return x.plain


def empty_rows(M: int, num_in: int, fmt: Fp8Format, dtype: torch.dtype, device: torch.device) -> Fp8Rows:
    P = M + _padding(M, fmt.by_block)
    return Fp8Rows(
        torch.empty((P, num_in), dtype=FP8, device=device),
        torch.empty((cdiv(num_in, BLOCK) if fmt.by_block else 1, P), dtype=torch.float32, device=device).t(),
        M,
        torch.empty((M, num_in), dtype=dtype, device=device) if fmt.keeps_plain else None,
    )


def quantise_rows(x: Tensor, fmt: Fp8Format) -> Fp8Rows:
    """x [M, I], any row stride, by a launch of its own."""
    M, num_in = x.shape
    rows = empty_rows(M, num_in, fmt._replace(keeps_plain=False), x.dtype, x.device)
    if runs_triton(x):
        quantise_into(x, rows.values, rows.scales, fmt.by_block)
    else:
        values, scales = quantise_torch(x, fmt.by_block)
        rows.values.view(torch.uint8)[:M] = values.view(torch.uint8)
        rows.scales[:M] = scales
    return Fp8Rows(rows.values, rows.scales, M, x if fmt.keeps_plain else None)


def in_format(x: Tensor, fmt: Fp8Format | None) -> Rows:
    """The rows as what reads `fmt` takes them."""
    return x if fmt is None else quantise_rows(x, fmt)


def _padding(M: int, by_block: bool) -> int:
    return -M % ALIGNED_ROWS if by_block else 0


@triton.jit
def store_fp8_row(
    x, values_ptr, scale_ptr, stride_scale, row,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, largest=None,
):  # fmt: skip
    """Stores x as row `row` (int64) of `values` and `scales`: HEADS times D values, float32, rounded as 16 bits are.

    x is a power of two of heads, BLOCK_D values apart, zeros where no value is. GROUP values share a scale; 0: all do.
    With several heads, GROUP divides D, or BLOCK_D is D (`groups_fit`). largest [1]: the row's largest magnitude, where
    all values share a scale and it is known."""
    GROUPS: tl.constexpr = x.numel // GROUP if GROUP else 1
    WIDTH: tl.constexpr = GROUP if GROUP else x.numel
    i = tl.arange(0, GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    first = tl.arange(0, GROUPS) * WIDTH
    if HEADS == 1 or BLOCK_D == D:
        column, first_column = i, first
        is_here, is_group = i < HEADS * D, first < HEADS * D
    else:  # a gap behind each head
        column, first_column = i // BLOCK_D * D + i % BLOCK_D, first // BLOCK_D * D + first % BLOCK_D
        is_here = (i // BLOCK_D < HEADS) & (i % BLOCK_D < D)
        is_group = (first // BLOCK_D < HEADS) & (first % BLOCK_D < D)
    value_ptrs = values_ptr + row * (HEADS * D) + column
    scale_ptrs = scale_ptr + (first_column // WIDTH).to(tl.int64) * stride_scale + row
    store_fp8(tl.reshape(x, (GROUPS, WIDTH)), value_ptrs, scale_ptrs, is_here, is_group, largest)


@triton.jit
def sum_and_largest(sum_a, largest_a, sum_b, largest_b):
    """For tl.reduce: of two tensors at once, since each reduction of a whole row waits for all warps, 0.2 us."""
    return sum_a + sum_b, tl.maximum(largest_a, largest_b)


def groups_fit(num_heads: int, D: int, BLOCK_D: int, fmt: Fp8Format) -> bool:
    """True if `store_fp8_row` takes such a row."""
    return not fmt.by_block or num_heads == 1 or D % BLOCK == 0 or (D == BLOCK_D and num_heads * D % BLOCK == 0)


def row_warps(width: int) -> int:
    """Warps of a program that computes a whole row of this many values, a power of two: 16 values a thread."""
    return min(16, max(4, width // 512))
