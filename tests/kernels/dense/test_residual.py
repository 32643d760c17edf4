"""Residual additions of a computed branch or of a product, with few rows and many, against float64."""

import pytest
import torch

from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.residual import Product, add_branch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ROWS = pytest.mark.parametrize("rows", [0, 1, 64, 65, 300])
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def inputs(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, Product, torch.Tensor, torch.Tensor]:
    """The stream, a branch whose rows are those of a wider tensor, its matrix, the norm's weight."""
    x = torch.randn(rows, 48, device=DEVICE).to(dtype)
    wide = torch.randn(rows, 40, device=DEVICE).to(dtype)[:, 8:]
    matrix = (torch.randn(48, 32, device=DEVICE) * 0.2).to(dtype)
    return x, Product(wide, LinearWeight(matrix)), matrix, torch.rand(48, device=DEVICE)


@ROWS
@DTYPES
def test_a_product_is_added_and_the_sum_normed(rows: int, dtype: torch.dtype):
    x, product, matrix, weight = inputs(rows, dtype)
    expected = x.double() + 0.22 * (product.x.double() @ matrix.double().T)

    total, normed = add_branch(x, product, 0.22, weight, 1e-3)

    bound = TOLERANCE[dtype]
    torch.testing.assert_close(total.double(), expected, atol=bound, rtol=bound)
    over_norm = (total.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    torch.testing.assert_close(normed.double(), total.double() * over_norm * weight, atol=bound, rtol=bound)
    assert total.dtype == normed.dtype == dtype


@ROWS
@DTYPES
def test_a_product_of_some_rows_is_computed_for_those(rows: int, dtype: torch.dtype):
    _, product, matrix, weight = inputs(rows, dtype)
    chosen = torch.arange(rows - 1, -1, -7, device=DEVICE)
    x = torch.zeros(len(chosen), 48, device=DEVICE, dtype=dtype)

    total, _ = add_branch(x, product.of_rows(chosen), 1.0, weight, 1e-3)

    expected = product.x[chosen].double() @ matrix.double().T
    torch.testing.assert_close(total.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_computed_branch_leaves_the_stream_as_it_was():
    x, product, matrix, weight = inputs(65, torch.float32)
    branch, before = product.x @ matrix.T, x.clone()
    total, _ = add_branch(x, branch, 0.22, weight, 1e-3)
    torch.testing.assert_close(total, before + 0.22 * branch)
    assert torch.equal(x, before)
