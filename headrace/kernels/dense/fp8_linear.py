"""Dense projection of many rows in FP8: y = x W^T, with x quantised as it comes.

Shapes    x [M, I], any row stride; weight [O, I]; returns [M, O]
Contract  Hopper GPUs; O is a multiple of 16 and I of 16, of 128 where blocks of columns have scales
Numerics  x gets a scale for each row, or for each BLOCK columns of a row where the weight has blocks; products of e4m3,
          sums in float32 (the matrix units keep fewer bits of a sum between steps), rounded once
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.dense.fp8 import BLOCK, Fp8Matrix, quantise
from headrace.kernels.lib.dispatch import is_hopper


def runs_fp8(weight: Fp8Matrix) -> bool:
    """True if products with `weight` run in FP8: see Contract."""
    num_out, num_in = weight.shape
    return is_hopper(weight.values.device) and num_out % 16 == 0 and num_in % (BLOCK if weight.has_blocks else 16) == 0


def fp8_linear(x: Tensor, weight: Fp8Matrix) -> Tensor:
    return scaled_product(*quantise(x, weight.has_blocks), weight)


def fp8_linear_torch(x: Tensor, weight: Fp8Matrix) -> Tensor:
    values, scales = quantise(x, weight.has_blocks)
    spread = scales.repeat_interleave(BLOCK, 1)[:, : x.shape[1]] if weight.has_blocks else scales
    return F.linear((values.float() * spread).to(x.dtype), weight.dequantised())


def scaled_product(values: Tensor, scales: Tensor, weight: Fp8Matrix) -> Tensor:
    """The library's product of quantised rows, as `quantise` gives them, and a weight."""
    if not weight.has_blocks:
        by_row = weight.by_row().scales
        return torch._scaled_mm(
            values, weight.values.t(), scale_a=scales, scale_b=by_row.t(), out_dtype=weight.dtype, use_fast_accum=True
        )
    recipe = F.ScalingType.BlockWise1x128 if weight.row_group == 1 else F.ScalingType.BlockWise128x128
    return F.scaled_mm(
        values, weight.values.t(), scales, F.ScalingType.BlockWise1x128, weight.scales.t(), recipe,
        output_dtype=weight.dtype,
    )  # fmt: skip
