"""Dense projection of many rows in FP8: y = x W^T.

Shapes    x [M, I]; weight [O, I]; returns [M, O]
Contract  see `runs_fp8` and `has_product`; x has a scale for each row, or for each BLOCK columns of a row where the
          weight has blocks
Numerics  products of e4m3, sums in float32 (the matrix units keep fewer bits of a sum between steps), rounded once
Source    the library's products, 1,300 to 1,450 TFLOP/s of an H200 with a scale for each row, 1,020 to 1,150 in blocks
          (docs/gpu-notes.md); Triton's were not faster
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.dense.fp8 import BLOCK, Fp8Matrix
from headrace.kernels.dense.fp8_rows import ALIGNED_ROWS, Fp8Rows
from headrace.kernels.lib.dispatch import is_hopper


def runs_fp8(weight: Fp8Matrix) -> bool:
    """True if Triton's products with `weight` run in FP8: on a Hopper GPU, with rows of whole blocks."""
    num_out, num_in = weight.shape
    return is_hopper(weight.values.device) and num_out % 16 == 0 and num_in % (BLOCK if weight.has_blocks else 16) == 0


def has_product(weight: Fp8Matrix) -> bool:
    """True if those run, and the library has a product for many rows."""
    if not weight.has_blocks:
        return runs_fp8(weight)
    return runs_fp8(weight) and weight.row_group == BLOCK and weight.scales.shape[1] % ALIGNED_ROWS == 0


def fp8_linear(x: Fp8Rows, weight: Fp8Matrix) -> Tensor:
    M = len(x)
    if M == 0:  # prompts without logits
        return torch.empty((0, weight.shape[0]), dtype=weight.dtype, device=x.values.device)
    if weight.has_blocks:
        recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        return F.scaled_mm(
            x.values, weight.values.t(), x.scales, recipes[0], weight.scales.t(), recipes[1], output_dtype=weight.dtype
        )[:M]
    by_row = weight.by_row().scales
    return torch._scaled_mm(
        x.values, weight.values.t(), scale_a=x.scales, scale_b=by_row.t(), out_dtype=weight.dtype, use_fast_accum=True
    )


def fp8_linear_torch(x: Fp8Rows, weight: Fp8Matrix) -> Tensor:
    M, width = len(x), x.width
    spread = x.scales.repeat_interleave(BLOCK, 1)[:, :width] if weight.has_blocks else x.scales
    return F.linear((x.values.float() * spread)[:M].to(weight.dtype), weight.dequantised())
