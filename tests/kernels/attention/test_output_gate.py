"""The output gate of attention against float64."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.attention.output_gate import gate_output, gate_output_torch, gate_output_triton
from tests.kernels.attention.paged import DEVICE
from tests.kernels.naive import NAN


def operands(T: int, H: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gate lies behind what is not read, as in a projection."""
    projected = torch.full((T, 2 * H * D), NAN, dtype=dtype, device=DEVICE)
    projected[:, H * D :] = 3 * torch.randn(T, H * D, device=DEVICE)
    x = torch.randn(T, H, D, device=DEVICE).to(dtype)
    return x, projected[:, H * D :].unflatten(1, (H, D))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize(("T", "H", "D"), [(0, 2, 16), (1, 1, 8), (5, 3, 48), (3, 16, 256)])
@pytest.mark.parametrize("gated", [gate_output_torch, gate_output_triton])
def test_each_value_is_gated(gated, T: int, H: int, D: int, dtype: torch.dtype, rtol: float):
    x, gate = operands(T, H, D, dtype)
    expected = x.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(gated(x, gate).double(), expected, atol=1e-6, rtol=rtol)


def test_operands_that_do_not_fit_are_named():
    x, gate = operands(3, 2, 16, torch.float32)
    for wrong_x, wrong_gate in [(x[:2], gate), (x, gate.transpose(1, 2)), (x[:, :1], gate[:, :1])]:
        with pytest.raises(ValueError, match="gate"):
            gate_output(wrong_x, wrong_gate)
