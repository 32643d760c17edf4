"""FP8 matrices (e4m3) with float32 scales, and rows of activations quantised beside them (`Fp8Rows`: fp8_rows.py).

    W[o, i] = values[o, i] * scales[o // row_group, i // column_group]

Per channel: a scale for each row of W, one column. Blocks: BLOCK rows and BLOCK columns share a scale, or one row does
where rows of several matrices were mixed.

Shapes    values [O, I]; scales [ceil(O / row_group), 1 or ceil(I / BLOCK)]; x [M, I], any row stride; quantised
          values [M, I], scales [M, G] in memory order [G, M] with G = 1 or ceil(I / BLOCK)
Numerics  a scale is the largest magnitude over 448, so that this becomes e4m3's largest number; rounded to nearest
Source    Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; blocks: DeepSeek-AI 2024, "DeepSeek-V3 Technical
          Report", section 3.3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
TINIEST = 1e-12  # a row of zeros has some scale, too
BLOCK = 128
LARGEST_NUMBER, TINIEST_SCALE = tl.constexpr(LARGEST), tl.constexpr(TINIEST)


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix in FP8 and its scales; `dtype` is that of products with it."""

    values: Tensor
    scales: Tensor
    row_group: int  # 1 or BLOCK
    dtype: torch.dtype

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        expected = (cdiv(rows, self.row_group), cdiv(columns, BLOCK) if self.scales.shape[1] > 1 else 1)
        if self.values.dtype != FP8 or self.scales.dtype != torch.float32 or self.scales.shape != expected:
            given = f"{tuple(self.values.shape)} {self.values.dtype}, scales {tuple(self.scales.shape)}"
            raise ValueError(f"{given} {self.scales.dtype}: needs e4m3 and float32 scales {expected}")

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def has_blocks(self) -> bool:
        """True if groups of columns have scales of their own."""
        return self.scales.shape[1] > 1

    def dequantised(self) -> Tensor:
        """[O, I] in `dtype`."""
        by_row = self.by_row()
        scales = by_row.scales.repeat_interleave(BLOCK, 1)[:, : self.shape[1]] if self.has_blocks else by_row.scales
        return (self.values.float() * scales).to(self.dtype)

    def by_row(self) -> Fp8Matrix:
        """The same with scales for each row."""
        if self.row_group == 1:
            return self
        scales = self.scales.repeat_interleave(self.row_group, 0)[: self.shape[0]]
        return replace(self, scales=scales.contiguous(), row_group=1)


Matrix: TypeAlias = Tensor | Fp8Matrix


def stack_rows(parts: Sequence[Matrix]) -> Matrix:
    """One matrix of the rows of several. FP8 stays FP8 if all are; otherwise the result is dequantised."""
    quantised = [part for part in parts if isinstance(part, Fp8Matrix)]
    if len(quantised) < len(parts):
        return torch.cat([part.dequantised() if isinstance(part, Fp8Matrix) else part for part in parts])
    whole_blocks = all(part.row_group == BLOCK for part in quantised)
    if not (whole_blocks and all(part.shape[0] % BLOCK == 0 for part in quantised[:-1])):
        quantised = [part.by_row() for part in quantised]
    groups = max(part.scales.shape[1] for part in quantised)
    scales = [part.scales.expand(-1, groups) if part.scales.shape[1] == 1 else part.scales for part in quantised]
    values = torch.cat([part.values.view(torch.uint8) for part in quantised]).view(FP8)
    return replace(quantised[0], values=values, scales=torch.cat(scales).contiguous())


def select_rows(matrix: Matrix, rows: Tensor) -> Matrix:
    """The matrix of these rows, int64 on any device, in their order."""
    rows = rows.to(matrix.values.device if isinstance(matrix, Fp8Matrix) else matrix.device)
    if not isinstance(matrix, Fp8Matrix):
        return matrix.index_select(0, rows)
    values = matrix.values.view(torch.uint8).index_select(0, rows).view(FP8)
    if matrix.row_group == BLOCK and len(rows) % BLOCK == 0:
        by_block = rows.view(-1, BLOCK)
        if torch.equal(by_block // BLOCK, (by_block[:, :1] // BLOCK).expand_as(by_block)):  # whole blocks stay together
            return replace(matrix, values=values, scales=matrix.scales.index_select(0, by_block[:, 0] // BLOCK))
    return replace(matrix, values=values, scales=matrix.by_row().scales.index_select(0, rows), row_group=1)


def quantise_matrix(weight: Tensor) -> Fp8Matrix:
    """A matrix quantised with a scale for each row."""
    scales = (weight.float().abs().amax(1, keepdim=True) / LARGEST).clamp_min(TINIEST)
    return Fp8Matrix((weight.float() / scales).to(FP8), scales, 1, weight.dtype)


def quantise(x: Tensor, by_block: bool) -> tuple[Tensor, Tensor]:
    """x in FP8, and a scale for each row, or for each BLOCK columns of it."""
    return (quantise_triton if runs_triton(x) else quantise_torch)(x, by_block)


def quantise_torch(x: Tensor, by_block: bool) -> tuple[Tensor, Tensor]:
    M, num_in = x.shape
    group = BLOCK if by_block else num_in
    groups = cdiv(num_in, group)
    padded = torch.zeros(M, groups * group, device=x.device)
    padded[:, :num_in] = x
    scales = (padded.view(M, groups, group).abs().amax(2) / LARGEST).clamp_min(TINIEST)
    values = (padded.view(M, groups, group) / scales[:, :, None]).view(M, groups * group)[:, :num_in].to(FP8)
    return values.contiguous(), scales.t().contiguous().t()


@triton.jit
def store_fp8(x, value_ptrs, scale_ptrs, is_here, is_group, largest=None):
    """Stores x [G, W], float32 with zeros where no value is, in FP8: each of the G groups has a scale.

    largest   [G]: the largest magnitudes, where they are known"""
    if largest is None:
        largest = tl.max(tl.abs(x), 1)
    scale = tl.maximum(largest / LARGEST_NUMBER, TINIEST_SCALE)
    tl.store(value_ptrs, (x / scale[:, None]).to(value_ptrs.dtype.element_ty), mask=is_here)
    tl.store(scale_ptrs, scale, mask=is_group)


@triton.jit(do_not_specialize=["stride_scale"])
def _quantise_kernel(
    x_ptr, out_ptr, scale_ptr, stride_scale, stride_x,
    IN: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A row a program: GROUPS groups of WIDTH columns. Scales of a column of groups lie side by side."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[:, None]
    i = group * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + row * stride_x + i, mask=i < IN, other=0.0).to(tl.float32)
    g = tl.arange(0, GROUPS)
    store_fp8(
        x, out_ptr + row * IN + i, scale_ptr + g.to(tl.int64) * stride_scale + row, i < IN, g < tl.cdiv(IN, WIDTH)
    )


def quantise_triton(x: Tensor, by_block: bool) -> tuple[Tensor, Tensor]:
    M, num_in = x.shape
    out = torch.empty((M, num_in), dtype=FP8, device=x.device)
    scales = torch.empty((cdiv(num_in, BLOCK) if by_block else 1, M), dtype=torch.float32, device=x.device).t()
    quantise_into(x, out, scales, by_block)
    return out, scales


def quantise_into(x: Tensor, out: Tensor, scales: Tensor, by_block: bool) -> None:
    """Quantises x [M, I] into the first M rows of `out` [P, I] and `scales` [P, G] in memory order [G, P]."""
    M, num_in = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"x has strides {x.stride()}: values of one row must lie side by side")
    width = BLOCK if by_block else next_power_of_2(num_in)
    if M:
        _quantise_kernel[(M,)](
            x, out, scales, len(out), x.stride(0), IN=num_in, GROUPS=next_power_of_2(cdiv(num_in, width)), WIDTH=width,
            num_warps=4 if num_in <= 4096 else 8, **OVERLAPPED,
        )  # fmt: skip
