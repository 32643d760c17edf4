"""Rows grouped by expert: each expert's lie in tiles of its own, and come back to their tokens."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.moe.experts import moe_experts_torch
from headrace.kernels.moe.experts_hopper import fits_hopper
from headrace.kernels.moe.grouped_linear_hopper import grouped_linear_torch
from headrace.kernels.moe.grouping import UNIT, Groups, gather_sum, group, spread
from tests.kernels.dense.rows import DEVICE, NAN, slice_of_projection

CHOICES = [(1, 5, 1), (63, 5, 2), (65, 48, 10), (200, 3, 2), (130, 7, 6)]  # tokens, experts, chosen


def choose(T: int, E: int, k: int) -> Tensor:
    """Nobody chooses the last expert, unless all must."""
    return torch.rand(T, max(E - 1, k), device=DEVICE).argsort(-1)[:, :k].int()


def check_tiles(expert: Tensor, groups: Groups) -> None:
    """Every entry has a row of its own, in a tile of its expert; no row is in two tiles, and none past the last."""
    place, tiles = groups.place.flatten().tolist(), groups.tiles[: int(groups.used)].tolist()
    assert len(set(place)) == len(place)
    expert_of_row: dict[int, int] = {}
    for e, first, units in tiles:
        assert units in (1, 2) and first % UNIT == 0 and first + units * UNIT <= groups.num_rows
        for row in range(first, first + units * UNIT):
            assert expert_of_row.setdefault(row, e) == e and len(expert_of_row) <= groups.num_rows
    assert len(expert_of_row) == UNIT * sum(units for _, _, units in tiles)
    assert [expert_of_row[row] for row in place] == expert.flatten().tolist()
    rows = torch.tensor(place).div(UNIT, rounding_mode="floor").unique()
    assert len(rows) == sum(units for _, _, units in tiles)  # no unit without a row


@pytest.mark.parametrize(("T", "E", "k"), CHOICES)
def test_each_expert_has_tiles_of_its_own(T: int, E: int, k: int):
    expert = choose(T, E, k)
    check_tiles(expert, group(expert, E))


def test_all_tokens_may_choose_the_same_expert():
    expert = torch.full((300, 1), 2, device=DEVICE)
    groups = group(expert, 4)
    check_tiles(expert, groups)
    assert groups.tiles[: int(groups.used)].tolist() == [[2, 0, 2], [2, 128, 2], [2, 256, 1]]


@pytest.mark.parametrize("D", [64, 528, 1088])
def test_rows_come_back_weighted(D: int):
    x, expert = slice_of_projection(65, D, torch.float32), choose(65, 9, 4)
    weight = torch.rand(65, 4, device=DEVICE)
    groups = group(expert, 9)
    y = gather_sum(spread(x, groups), weight, groups)
    torch.testing.assert_close(y, x * weight.sum(1, keepdim=True))


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize(("T", "E", "k"), CHOICES)
def test_experts_of_grouped_rows(T: int, E: int, k: int, has_gate: bool):
    """With the products' reference: what lies between experts' rows is NaN, and reaches no token."""
    D, inner = 64, 48
    x, expert, weight = torch.randn(T, D, device=DEVICE), choose(T, E, k), torch.rand(T, k, device=DEVICE)
    up = torch.randn(E, (1 + has_gate) * inner, D, device=DEVICE) * D**-0.5
    down = torch.randn(E, D, inner, device=DEVICE) * inner**-0.5
    if k < E:
        up[-1] = down[-1] = NAN
    groups = group(expert, E)
    hidden = grouped_linear_torch(spread(x, groups), up, groups, "swiglu" if has_gate else "relu_squared")
    y = gather_sum(grouped_linear_torch(hidden, down, groups, "none"), weight, groups)
    torch.testing.assert_close(y, moe_experts_torch(x, expert.long(), weight, up, down), atol=1e-4, rtol=1e-4)


def test_other_devices_and_dtypes_do_not_fit():
    x, up, down = torch.zeros(4, 64), torch.zeros(2, 128, 64), torch.zeros(2, 64, 64)
    assert not fits_hopper(x.to(DEVICE), up.to(DEVICE), down.to(DEVICE))
    assert not fits_hopper(x.bfloat16(), up.bfloat16(), down.bfloat16())
