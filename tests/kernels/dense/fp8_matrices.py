"""Random matrices in FP8, by what shares a scale."""

import torch

from headrace.kernels.dense.fp8 import BLOCK, FP8, Fp8Matrix
from headrace.kernels.lib.sizes import cdiv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUPINGS = {"per channel": (1, False), "blocks": (BLOCK, True), "blocks of one row": (1, True)}


def random_matrix(rows: int, columns: int, grouping: str = "blocks") -> Fp8Matrix:
    row_group, has_blocks = GROUPINGS[grouping]
    scales = torch.rand(cdiv(rows, row_group), cdiv(columns, BLOCK) if has_blocks else 1, device=DEVICE) + 0.5
    values = torch.randn(rows, columns, device=DEVICE).to(FP8)
    return Fp8Matrix(values, scales * columns**-0.5, row_group, torch.bfloat16)
