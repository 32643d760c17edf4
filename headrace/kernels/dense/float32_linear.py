"""Products of rows with a matrix in float32: y = x W^T, for routers whose scores must not be rounded to 16 bits.

    W = P_1 + P_2 + P_3      each in bfloat16, as many as W needs: one if it was stored in bfloat16

Shapes    x [M, I]; weight [O, I] float32; returns [M, O] float32
Numerics  a product of two values in bfloat16 is exact in float32: on a GPU, rows in bfloat16 are multiplied with the
          parts by the matrix units, and the sums are as good as float32's. Other rows are widened first
Source    Henry et al. 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
          Computations". Library products in float32 took 125 us for 8,192 rows of Nemotron 3 Nano's routers, and
          widening the rows 65 (one H200)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.dense.small_linear import MOST_ROWS, small_linear_triton
from headrace.kernels.lib.dispatch import runs_triton

MOST_PARTS = 3  # of 8 bits each, which hold the 24 of a float32


class Float32Linear:
    def __init__(self, weight: Tensor):
        self._weight = weight
        self._parts = torch.cat(bfloat16_parts(weight)) if runs_triton(weight) else None  # [P * O, I]

    def __call__(self, x: Tensor) -> Tensor:
        if self._parts is None or x.dtype != torch.bfloat16:
            return F.linear(x.float(), self._weight)
        if 0 < len(x) <= MOST_ROWS:
            y = small_linear_triton(x, self._parts, "parts")  # [S, M, P * O]
        else:
            y = torch.mm(x, self._parts.T, out_dtype=torch.float32)[None]
        y = y.unflatten(2, (-1, len(self._weight)))
        return y[0, :, 0] if y.shape[0] == y.shape[2] == 1 else y.sum((0, 2))


def bfloat16_parts(weight: Tensor) -> list[Tensor]:
    """Matrices in bfloat16 that sum to `weight` as float32 has it, largest values first; no more than it takes."""
    parts = [weight.bfloat16()]
    rest = weight - parts[0].float()
    while len(parts) < MOST_PARTS and bool(rest.any()):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return parts
