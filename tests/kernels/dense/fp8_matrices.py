"""Random matrices in FP8, by what shares a scale."""

import torch
from torch import Tensor

from headrace.kernels.dense.fp8 import BLOCK, FP8, Fp8Matrix
from headrace.kernels.lib.sizes import cdiv

ROWS_TOGETHER = 9  # so many are not all among the worst
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUPINGS = {"per channel": (1, False), "blocks": (BLOCK, True), "blocks of one row": (1, True)}


def random_matrix(rows: int, columns: int, grouping: str = "blocks") -> Fp8Matrix:
    row_group, has_blocks = GROUPINGS[grouping]
    scales = torch.rand(cdiv(rows, row_group), cdiv(columns, BLOCK) if has_blocks else 1, device=DEVICE) + 0.5
    values = torch.randn(rows, columns, device=DEVICE).to(FP8)
    return Fp8Matrix(values, scales * columns**-0.5, row_group, torch.bfloat16)


def assert_rounded_as_fp8(actual: Tensor, expected: Tensor) -> None:
    """Rows [T, D] are off by what two roundings of inputs to e4m3 cost: in all, each of them, and each element.

    Over all rows alone, one that is wrong would be lost among many. Of 20,000 rows rounded so in float64 (128 values,
    128 inside) half are off by more than 0.044, 5 % by more than 0.06, the worst by 0.089; its worst element by 0.29 of
    the row's root mean square. Nine rows together are off by 0.056 at most, 64 by 0.050; fewer have each row's bound.
    """
    error, size = (actual.double() - expected).abs(), expected.norm(dim=-1, keepdim=True)
    if len(expected) >= ROWS_TOGETHER:
        assert error.norm() < 0.06 * expected.norm()
    assert (error.norm(dim=-1, keepdim=True) < 0.1 * size).all()
    assert (error < 0.4 * size * expected.shape[-1] ** -0.5).all()
