"""Gated norms: the references against their definitions, Triton against the references."""

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.dense.gated_rms_norm import (
    gate_then_norm,
    gate_then_norm_torch,
    gate_then_norm_triton,
    norm_then_gate,
    norm_then_gate_torch,
    norm_then_gate_triton,
)
from tests.kernels.dense.rows import DEVICE, SHAPES, assert_close, dtypes, slice_of_projection

ROWS = [0, 1, 63, 65]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("groups", [1, 4])
def test_gate_then_norm_is_its_definition(rows: int, groups: int):
    wide = torch.randn(rows, 70)
    x, gate, weight = torch.randn(rows, 40), wide[:, 5:45], torch.randn(40)
    gated = (x * F.silu(gate)).double().view(rows, groups, 40 // groups)
    normed = gated * (gated.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    before = wide.clone()
    y = gate_then_norm(x, gate, weight, 1e-3, groups)
    torch.testing.assert_close(y.double(), normed.view(rows, 40) * weight.double(), atol=1e-5, rtol=1e-5)
    assert torch.equal(wide, before)


@dtypes
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_without_a_norm_the_gate_remains(rows: int, width: int, dtype: torch.dtype):
    x, gate = torch.randn(rows, width, device=DEVICE).to(dtype), slice_of_projection(rows, width, dtype)
    expected = (x.double() * F.silu(gate.double())).to(dtype)
    assert_close(gate_then_norm(x, gate, None, 1e-3, 1), expected)
    assert_close(gate_then_norm_triton(x, gate, None, 1e-3, 1), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_norm_then_gate_is_its_definition(rows: int):
    x, gate, weight = torch.randn(rows, 3, 8), torch.randn(rows, 3, 8), torch.randn(8)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
    y, of_sigmoid = norm_then_gate(x, gate, weight, 1e-3), norm_then_gate(x, gate, weight, 1e-3, sigmoid=True)
    torch.testing.assert_close(y.double(), normed * F.silu(gate.double()), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(of_sigmoid.double(), normed * gate.double().sigmoid(), atol=1e-5, rtol=1e-5)


@dtypes
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_gate_then_norm_in_triton_equals_the_reference(rows: int, width: int, groups: int, dtype: torch.dtype):
    x, gate = torch.randn(rows, width, device=DEVICE).to(dtype), slice_of_projection(rows, width, dtype)
    weight = torch.rand(width, device=DEVICE)
    actual = gate_then_norm_triton(x, gate, weight, 1e-3, groups)
    assert_close(actual, gate_then_norm_torch(x, gate, weight, 1e-3, groups))


@dtypes
@pytest.mark.parametrize(("rows", "heads", "width"), [(0, 3, 8), (1, 3, 8), (9, 3, 24), (63, 4, 128)])
def test_norm_then_gate_in_triton_equals_the_reference(rows: int, heads: int, width: int, dtype: torch.dtype):
    x = torch.randn(rows, heads, width, device=DEVICE).to(dtype)
    gate = slice_of_projection(rows, heads * width, dtype).view(rows, heads, width)
    weight = torch.rand(width, device=DEVICE)
    for sigmoid in (False, True):
        actual = norm_then_gate_triton(x, gate, weight, 1e-3, sigmoid)
        assert_close(actual, norm_then_gate_torch(x, gate, weight, 1e-3, sigmoid))
