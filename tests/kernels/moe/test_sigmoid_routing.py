"""Routing by sigmoid scores: the reference against its definition, Triton against the reference."""

import pytest
import torch

from headrace.kernels.moe.sigmoid_routing import (
    SigmoidRouting,
    moe_route_sigmoid,
    moe_route_sigmoid_torch,
    moe_route_sigmoid_triton,
)
from tests.kernels.dense.rows import DEVICE


def test_the_bias_chooses_and_does_not_weigh():
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 9.0])
    weight, expert = moe_route_sigmoid(logits, bias, SigmoidRouting(2, renormalize=False, scale=3.0))
    assert expert.tolist() == [[3, 0]]
    torch.testing.assert_close(weight, 3.0 * torch.tensor([[-1.0, 2.0]]).sigmoid())


def test_what_a_family_adds_to_the_sum_is_in_the_divisor():
    logits = torch.tensor([[0.0, 0.0, -9.0]])
    for route in (moe_route_sigmoid, moe_route_sigmoid_triton):
        weight, _ = route(logits.to(DEVICE), None, SigmoidRouting(2, True, smallest=1.0))
        torch.testing.assert_close(weight.cpu(), torch.tensor([[0.25, 0.25]]))


def test_experts_come_from_the_groups_whose_two_best_are_worth_most():
    logits = torch.tensor([[9.0, -9.0, -9.0, 1.0, 1.0, -2.0]])  # the best expert has a poor neighbour
    weight, expert = moe_route_sigmoid(logits, None, SigmoidRouting(2, True, num_groups=2, chosen_groups=1))
    assert set(expert[0].tolist()) == {3, 4}
    torch.testing.assert_close(weight, torch.tensor([[0.5, 0.5]]))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "k", "groups", "chosen"),
    [(0, 4, 2, 1, 1), (1, 6, 2, 3, 2), (9, 128, 6, 8, 4), (5, 3, 3, 1, 1), (4, 20, 5, 5, 5), (3, 18, 4, 3, 1)],
)
def test_triton_equals_the_reference(
    rows: int, experts: int, k: int, groups: int, chosen: int, has_bias: bool, renormalize: bool
):
    logits = torch.randn(rows, experts + 3, device=DEVICE)[:, :experts]
    bias = torch.randn(experts, device=DEVICE) * 0.3 if has_bias else None
    routing = SigmoidRouting(k, renormalize, groups, chosen, 2.5)
    weight, expert = moe_route_sigmoid_triton(logits, bias, routing)
    expected_weight, expected_expert = moe_route_sigmoid_torch(logits, bias, routing)
    assert torch.equal(expert.long(), expected_expert)
    torch.testing.assert_close(weight, expected_weight)


def test_groups_must_hold_the_chosen_experts():
    with pytest.raises(ValueError, match="3 of 8 experts in 4 groups cannot be chosen from 1"):
        moe_route_sigmoid(torch.zeros(1, 8), None, SigmoidRouting(3, True, num_groups=4, chosen_groups=1))
