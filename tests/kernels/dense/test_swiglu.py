"""SwiGLU's gate in Triton against its reference."""

import pytest
import torch

from headrace.kernels.dense.swiglu import swiglu_torch, swiglu_triton
from tests.kernels.dense.rows import SHAPES, assert_close, dtypes, slice_of_projection


@dtypes
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_triton_equals_the_reference(rows: int, width: int, dtype: torch.dtype):
    gate_up = slice_of_projection(rows, 2 * width, dtype)
    assert_close(swiglu_triton(gate_up, block=64 if width < 200 else 2048), swiglu_torch(gate_up))
