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


def slice_of_projection(rows: int, width: int, dtype: torch.dtype, behind: int = 3) -> Tensor:
    """Columns of a wider tensor, which is NaN in 8 columns before them and in `behind` ones.

    The stride is odd where the width is even. With behind=8 it is a multiple of 16 where the width is one: what copies
    of 16 bytes need."""
    wide = torch.full((rows, 8 + width + behind), NAN, dtype=dtype, device=DEVICE)
    wide[:, 8 : 8 + width] = torch.randn(rows, width, device=DEVICE)
    return wide[:, 8 : 8 + width]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = 1e-5 if actual.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), expected.double(), atol=bound, rtol=bound)
