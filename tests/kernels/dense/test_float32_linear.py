"""Products with a matrix in float32: as exact as float32's, also where the matrix units multiply parts of it."""

import pytest
import torch

from headrace.kernels.dense import float32_linear
from headrace.kernels.dense.float32_linear import Float32Linear, bfloat16_parts
from tests.kernels.dense.rows import DEVICE, slice_of_projection


@pytest.mark.parametrize("is_stored_in_16_bits", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 64, 65, 700])
def test_sums_are_as_good_as_those_of_float32(rows: int, is_stored_in_16_bits: bool):
    weight = torch.randn(48, 1024, device=DEVICE)
    weight = weight.bfloat16().float() if is_stored_in_16_bits else weight
    x = slice_of_projection(rows, 1024, torch.bfloat16, behind=8)
    y = Float32Linear(weight)(x)
    expected = x.double() @ weight.double().T
    assert y.dtype == torch.float32 and y.shape == (rows, 48)
    # Sums of 1,024 products of about one: 2^-24 of them each, and no more than the root of their number.
    torch.testing.assert_close(y.double(), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("is_stored_in_16_bits", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_few_rows_are_multiplied_with_the_parts(rows: int, is_stored_in_16_bits: bool, monkeypatch: pytest.MonkeyPatch):
    """In the interpreter, too."""
    monkeypatch.setattr(float32_linear, "runs_triton", lambda x: True)
    weight = torch.randn(24, 256, device=DEVICE)
    weight = weight.bfloat16().float() if is_stored_in_16_bits else weight
    x = slice_of_projection(rows, 256, torch.bfloat16, behind=8)
    y = Float32Linear(weight)(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, atol=1e-4, rtol=0)


def test_rows_of_other_types_are_widened():
    weight, x = torch.randn(5, 64, device=DEVICE), torch.randn(3, 64, device=DEVICE)
    torch.testing.assert_close(Float32Linear(weight)(x).double(), x.double() @ weight.double().T, atol=1e-4, rtol=0)


def test_a_matrix_has_as_many_parts_as_it_takes():
    weight = torch.randn(64, 96)
    parts = bfloat16_parts(weight)
    assert len(parts) == 3 and torch.equal(sum(part.double() for part in parts), weight.double())
    assert len(bfloat16_parts(weight.bfloat16().float())) == 1
    assert len(bfloat16_parts(weight.half().float())) == 2
