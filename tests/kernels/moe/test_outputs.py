"""Sums of experts' outputs and of what is beside them: Triton against the definition in float64."""

import pytest
import torch

from headrace.kernels.moe.outputs import Placed, Shared, sum_outputs, sum_outputs_torch, sum_outputs_triton
from tests.kernels.dense.rows import DEVICE, NAN, dtypes, slice_of_projection


def shared_of(T: int, D: int, dtype: torch.dtype, parts: int, has_gate: bool) -> Shared:
    """x is a slice of wider rows, NaN around it."""
    output = torch.randn(parts, T, D, device=DEVICE) if parts else torch.randn(T, D, device=DEVICE).to(dtype)
    x = slice_of_projection(T, 48, dtype)
    return Shared(output, x, torch.randn(1, 48, device=DEVICE).to(dtype) if has_gate else None)


@dtypes
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("parts", [0, 1, 4])
@pytest.mark.parametrize(("T", "k", "D"), [(1, 1, 16), (5, 3, 80), (65, 8, 64)])
def test_experts_and_what_is_beside_them(T: int, k: int, D: int, parts: int, has_gate: bool, dtype: torch.dtype):
    outputs, shared = torch.randn(T, k, D, device=DEVICE).to(dtype), shared_of(T, D, dtype, parts, has_gate)
    expected = shared.output.double() if parts == 0 else shared.output.double().sum(0)
    if shared.gate is not None:
        expected = expected * torch.sigmoid(shared.x.double() @ shared.gate.double().T)
    expected = outputs.double().sum(1) + expected
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    for add in (sum_outputs_triton, sum_outputs_torch):
        actual = add(outputs, shared)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, atol=bound, rtol=bound)


@dtypes
@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize(("T", "k", "D"), [(1, 1, 16), (65, 4, 528)])
def test_rows_come_back_weighted(T: int, k: int, D: int, is_beside: bool, dtype: torch.dtype):
    """Rows that no token has are NaN."""
    place, weight = torch.randperm(T * k + 3, device=DEVICE)[: T * k].view(T, k), torch.rand(T, k, device=DEVICE)
    rows = torch.full((T * k + 3, D), NAN, device=DEVICE, dtype=dtype)
    rows[place.flatten()] = torch.randn(T * k, D, device=DEVICE).to(dtype)
    placed, shared = Placed(rows, place.int(), weight), shared_of(T, D, dtype, 2, True) if is_beside else None
    expected = (rows[place].double() * weight.double()[..., None]).sum(1)
    if shared is not None:
        expected += sum_outputs_torch(torch.zeros(T, 1, D, dtype=dtype, device=DEVICE), shared).double()
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    for add in (sum_outputs_triton, sum_outputs_torch):
        torch.testing.assert_close(add(placed, shared).double(), expected, atol=bound, rtol=bound)


@dtypes
def test_nothing_beside_the_experts(dtype: torch.dtype):
    outputs = torch.randn(7, 4, 32, device=DEVICE).to(dtype)
    torch.testing.assert_close(sum_outputs_triton(outputs, None), sum_outputs_torch(outputs, None))
    assert torch.equal(sum_outputs(outputs[:, :1]), outputs[:, 0])


def test_no_rows():
    shared = shared_of(0, 32, torch.bfloat16, 2, True)
    assert sum_outputs_triton(torch.empty(0, 2, 32, dtype=torch.bfloat16, device=DEVICE), shared).shape == (0, 32)


def test_gaps_are_refused():
    with pytest.raises(ValueError, match="no gaps"):
        sum_outputs_triton(torch.randn(2, 3, 32, device=DEVICE)[:, :, :16], None)


def test_sizes_that_disagree_are_refused():
    shared = shared_of(3, 32, torch.float32, 2, True)
    with pytest.raises(ValueError, match="disagree"):
        sum_outputs(torch.randn(3, 2, 16, device=DEVICE), shared)
    with pytest.raises(ValueError, match="disagree"):
        sum_outputs(torch.randn(3, 2, 32, device=DEVICE), shared._replace(x=shared.x[:, :40]))
