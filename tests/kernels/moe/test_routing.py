"""Routing to experts in Triton against its reference."""

import pytest
import torch

from headrace.kernels.moe.routing import moe_route_torch, moe_route_triton
from tests.kernels.dense.rows import DEVICE


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("rows", "experts", "k"), [(0, 4, 2), (1, 6, 2), (9, 72, 10), (5, 3, 3)])
def test_triton_equals_the_reference(rows: int, experts: int, k: int, renormalize: bool):
    logits = torch.randn(rows, experts + 3, device=DEVICE)[:, :experts]
    weight, expert = moe_route_triton(logits, k, renormalize)
    expected_weight, expected_expert = moe_route_torch(logits, k, renormalize)
    assert torch.equal(expert.long(), expected_expert)
    torch.testing.assert_close(weight, expected_weight)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: the interpreter's maximum of NaNs is another")
@pytest.mark.parametrize("renormalize", [False, True])
def test_no_row_chooses_an_expert_that_is_none(renormalize: bool):
    """Memory behind the last expert would be read."""
    logits = torch.full((2, 5), float("nan"), device=DEVICE)
    _, expert = moe_route_triton(logits, 3, renormalize)
    assert ((expert >= 0) & (expert < 5)).all()
