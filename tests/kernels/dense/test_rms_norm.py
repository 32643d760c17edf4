"""RMS norm: the reference against its definition, Triton against the reference."""

import pytest
import torch

from headrace.kernels.dense.rms_norm import (
    add_rms_norm_torch,
    add_rms_norm_triton,
    l2_normalize,
    rms_norm,
    rms_norm_torch,
    rms_norm_triton,
)
from tests.kernels.dense.rows import DEVICE, SHAPES, assert_close, dtypes, slice_of_projection

ROWS = [0, 1, 63, 65]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_definition(rows: int, dtype: torch.dtype):
    x, weight = torch.randn(rows, 3, 40).to(dtype), torch.randn(3, 40)
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
    y = rms_norm(x, weight, 1e-3)
    assert y.dtype == dtype
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), expected, atol=bound, rtol=bound)


def test_l2_normalize_survives_a_zero_row():
    x = torch.stack((torch.zeros(8), torch.full((8,), 3.0)))
    y = l2_normalize(x, 1e-6)
    assert torch.equal(y[0], torch.zeros(8))
    torch.testing.assert_close(y[1].norm(), torch.tensor(1.0))


@dtypes
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_triton_equals_the_reference(rows: int, width: int, dtype: torch.dtype):
    x, weight = slice_of_projection(rows, width, dtype), torch.rand(width, device=DEVICE)
    assert_close(rms_norm_triton(x, weight, 1e-3), rms_norm_torch(x, weight, 1e-3))


@dtypes
def test_rms_norm_with_a_weight_for_each_head(dtype: torch.dtype):
    x, weight = torch.randn(7, 3, 40, device=DEVICE).to(dtype), torch.rand(3, 40, device=DEVICE)
    assert_close(rms_norm_triton(x, weight, 1e-3), rms_norm_torch(x, weight, 1e-3))


@dtypes
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("norm", [rms_norm_torch, rms_norm_triton])
def test_normed_rows_may_be_a_part_of_others(norm, rows: int, width: int, dtype: torch.dtype):
    x, weight = slice_of_projection(rows, width, dtype), torch.rand(width, device=DEVICE)
    wide = torch.full((rows, 2 * width), torch.nan, dtype=dtype, device=DEVICE)
    norm(x, weight, 1e-3, wide[:, width:])
    assert_close(wide[:, width:].contiguous(), rms_norm_torch(x, weight, 1e-3))
    assert wide[:, :width].isnan().all()


def test_normed_rows_must_be_like_the_given_ones():
    x, weight = torch.zeros(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    for out in (x[:1], x.bfloat16(), torch.zeros(8, 2, device=DEVICE).t()):
        with pytest.raises(ValueError, match="holds no rows"):
            rms_norm(x, weight, 1e-3, out)


@dtypes
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_residual_addition_and_rms_norm(rows: int, width: int, dtype: torch.dtype):
    x, branch = slice_of_projection(rows, width, dtype), slice_of_projection(rows, width, dtype)
    weight = torch.rand(width, device=DEVICE)
    total, normed = add_rms_norm_triton(x, branch, 0.22, weight, 1e-3)
    expected_total, expected_normed = add_rms_norm_torch(x, branch, 0.22, weight, 1e-3)
    assert_close(total, expected_total)
    assert_close(normed, expected_normed)


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_a_residual_branch_may_come_in_parts(rows: int, width: int, parts: int):
    x, branch = slice_of_projection(rows, width, torch.bfloat16), torch.randn(parts, rows, width, device=DEVICE)
    weight = torch.rand(width, device=DEVICE)
    total, normed = add_rms_norm_triton(x, branch, 0.22, weight, 1e-3)
    expected_total, expected_normed = add_rms_norm_torch(x, branch, 0.22, weight, 1e-3)
    assert_close(total, expected_total)
    assert_close(normed, expected_normed)
