"""Inputs and bounds for the tests of Triton kernels that work on rows."""

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
# Rows, width: one row and many, widths that fill a tile, that leave some of it empty, and real ones.
SHAPES = [(0, 40), (1, 40), (5, 64), (37, 40), (3, 130)]
if DEVICE.type == "cuda":
    SHAPES += [(1, 2048), (65, 2560), (300, 4096), (2, 12000)]


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def slice_of_projection(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Columns of a wider tensor, which is NaN around them."""
    wide = torch.full((rows, width + 11), NAN, dtype=dtype, device=DEVICE)
    wide[:, 8 : 8 + width] = torch.randn(rows, width, device=DEVICE)
    return wide[:, 8 : 8 + width]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = 1e-5 if actual.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), expected.double(), atol=bound, rtol=bound)
