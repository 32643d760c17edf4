"""The squared positive part in Triton against its reference."""

import pytest
import torch

from headrace.kernels.dense.relu_squared import relu_squared_torch, relu_squared_triton
from tests.kernels.dense.rows import SHAPES, assert_close, dtypes, slice_of_projection


@dtypes
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_triton_equals_the_reference(rows: int, width: int, dtype: torch.dtype):
    x = slice_of_projection(rows, width, dtype)
    assert_close(relu_squared_triton(x, block=64 if width < 200 else 2048), relu_squared_torch(x))
