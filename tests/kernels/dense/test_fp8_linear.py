"""Products of many rows in FP8 against their reference, on a Hopper GPU."""

import pytest
import torch

from headrace.kernels.dense.fp8_linear import fp8_linear, fp8_linear_torch, has_product
from headrace.kernels.dense.fp8_rows import Fp8Format, quantise_rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.lib.dispatch import is_hopper
from tests.kernels.dense.fp8_matrices import DEVICE, random_matrix

needs_hopper = pytest.mark.skipif(not is_hopper(DEVICE), reason="needs a Hopper GPU")


@needs_hopper
@pytest.mark.parametrize("grouping", ["per channel", "blocks"])
@pytest.mark.parametrize("M", [0, 1, 65, 100, 777])
def test_the_library_multiplies_as_the_reference(M: int, grouping: str):
    x, weight = torch.randn(M, 512, device=DEVICE).bfloat16(), random_matrix(1024, 512, grouping)
    assert has_product(weight)
    rows = quantise_rows(x, Fp8Format(weight.has_blocks))
    torch.testing.assert_close(fp8_linear(rows, weight), fp8_linear_torch(rows, weight), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(LinearWeight(weight)(x), fp8_linear_torch(rows, weight), atol=2e-2, rtol=2e-2)


def test_where_fp8_does_not_run_products_are_those_of_the_dequantised_weight():
    x, weight = torch.randn(5, 200, device=DEVICE).bfloat16(), random_matrix(24, 200, "blocks of one row")
    assert not has_product(weight)
    torch.testing.assert_close(LinearWeight(weight)(x), x @ weight.dequantised().T, atol=2e-2, rtol=2e-2)


def test_the_reference_rounds_x_to_eight_bits():
    x, weight = torch.randn(20, 256, device=DEVICE).bfloat16(), random_matrix(64, 256)
    rows = quantise_rows(x, Fp8Format(weight.has_blocks))
    y, exact = fp8_linear_torch(rows, weight).float(), x.float() @ weight.dequantised().float().T
    assert 0.005 < (y - exact).norm() / exact.norm() < 0.05
