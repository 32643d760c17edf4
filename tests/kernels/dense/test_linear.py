"""Packed projections against the plain matrix."""

import pytest
import torch

from headrace.kernels.dense.linear import LinearWeight

ROWS = [0, 1, 63, 65]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_weight_multiplies_like_the_plain_matrix(rows: int, dtype: torch.dtype):
    x, weight = torch.randn(rows, 50).to(dtype)[:, 3:33], torch.randn(70, 30).to(dtype)
    y = LinearWeight(weight)(x)
    assert y.shape == (rows, 70) and y.dtype == dtype
    bound = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), atol=bound, rtol=0.01)
