"""Dense projection of many rows in FP8: y = x W^T, with x quantised as it comes.

Shapes    x [M, I], any row stride; weight [O, I]; returns [M, O]
Contract  see `runs_fp8` and `has_product`
Numerics  x gets a scale for each row, or for each BLOCK columns of a row where the weight has blocks; products of e4m3,
          sums in float32 (the matrix units keep fewer bits of a sum between steps), rounded once
Source    the library's products, 1,300 to 1,450 TFLOP/s of an H200 with a scale for each row, 1,020 to 1,150 in blocks
          (docs/gpu-notes.md); Triton's were not faster
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.dense.fp8 import BLOCK, Fp8Matrix, quantise
from headrace.kernels.lib.dispatch import is_hopper

ALIGNED_SCALES = 4  # the library takes columns of scales that begin at multiples of 16 bytes


def runs_fp8(weight: Fp8Matrix) -> bool:
    """True if Triton's products with `weight` run in FP8: on a Hopper GPU, with rows of whole blocks."""
    num_out, num_in = weight.shape
    return is_hopper(weight.values.device) and num_out % 16 == 0 and num_in % (BLOCK if weight.has_blocks else 16) == 0


def has_product(weight: Fp8Matrix) -> bool:
    """True if those run, and the library has a product for many rows."""
    if not weight.has_blocks:
        return runs_fp8(weight)
    return runs_fp8(weight) and weight.row_group == BLOCK and weight.scales.shape[1] % ALIGNED_SCALES == 0


def fp8_linear(x: Tensor, weight: Fp8Matrix) -> Tensor:
    if len(x) == 0:  # prompts without logits
        return x.new_empty(0, weight.shape[0])
    missing = -len(x) % ALIGNED_SCALES
    if weight.has_blocks and missing:
        return _product(*quantise(F.pad(x, (0, 0, 0, missing)), True), weight)[: len(x)]
    return _product(*quantise(x, weight.has_blocks), weight)


def fp8_linear_torch(x: Tensor, weight: Fp8Matrix) -> Tensor:
    values, scales = quantise(x, weight.has_blocks)
    spread = scales.repeat_interleave(BLOCK, 1)[:, : x.shape[1]] if weight.has_blocks else scales
    return F.linear((values.float() * spread).to(x.dtype), weight.dequantised())


def _product(values: Tensor, scales: Tensor, weight: Fp8Matrix) -> Tensor:
    """The library's product of quantised rows, as `quantise` gives them, and a weight."""
    if weight.has_blocks:
        recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        return F.scaled_mm(
            values, weight.values.t(), scales, recipes[0], weight.scales.t(), recipes[1], output_dtype=weight.dtype
        )
    by_row = weight.by_row().scales
    return torch._scaled_mm(
        values, weight.values.t(), scale_a=scales, scale_b=by_row.t(), out_dtype=weight.dtype, use_fast_accum=True
    )
