"""Rows grouped by expert: each expert's lie in tiles of its own, and come back to their tokens."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.dense.fp8 import quantise_torch
from headrace.kernels.moe.experts import moe_experts_torch
from headrace.kernels.moe.experts_hopper import fits_hopper
from headrace.kernels.moe.grouped_linear_hopper import Operand, grouped_linear_torch
from headrace.kernels.moe.grouping import UNIT, Groups, group
from headrace.kernels.moe.outputs import Placed, sum_outputs
from headrace.kernels.moe.quantise_grouped import quantise_grouped
from tests.kernels.dense.rows import DEVICE, NAN

CHOICES = [(1, 5, 1), (63, 5, 2), (65, 48, 10), (200, 3, 2), (130, 7, 6)]  # tokens, experts, chosen


def choose(T: int, E: int, k: int) -> Tensor:
    """Nobody chooses the last expert, unless all must."""
    return torch.rand(T, max(E - 1, k), device=DEVICE).argsort(-1)[:, :k].int()


def check_tiles(expert: Tensor, groups: Groups) -> None:
    """Every entry has a row of its own, its token's, in a tile of its expert; tiles have these rows and no others."""
    place, tiles = groups.place.flatten().tolist(), groups.tiles[: int(groups.used)].tolist()
    expert_of_row: dict[int, int] = {}
    for e, first, count in tiles:
        assert 1 <= count <= 2 * UNIT and first % UNIT == 0
        for row in range(first, first + count):
            assert expert_of_row.setdefault(row, e) == e and row < groups.num_rows
    assert sum(count for *_, count in tiles) == len(expert_of_row) == len(set(place)) == len(place)
    assert [expert_of_row[row] for row in place] == expert.flatten().tolist()
    assert [int(groups.token[row]) for row in place] == [i // expert.shape[1] for i in range(len(place))]
    whole = [first + row for _, first, count in tiles for row in range(0, -(-count // UNIT) * UNIT)]
    assert len(set(whole)) == len(whole) and max(whole) < groups.num_rows  # no product writes another's rows


@pytest.mark.parametrize(("T", "E", "k"), CHOICES)
def test_each_expert_has_tiles_of_its_own(T: int, E: int, k: int):
    expert = choose(T, E, k)
    check_tiles(expert, group(expert, E))


def test_all_tokens_may_choose_the_same_expert():
    expert = torch.full((300, 1), 2, device=DEVICE)
    groups = group(expert, 4)
    check_tiles(expert, groups)
    assert groups.tiles[: int(groups.used)].tolist() == [[2, 0, 128], [2, 128, 128], [2, 256, 44]]


@pytest.mark.parametrize("D", [64, 528])
def test_rows_of_tiles_are_quantised(D: int):
    groups = group(choose(200, 5, 2), 5)
    x = torch.full((groups.num_rows, D), NAN, device=DEVICE, dtype=torch.bfloat16)
    place = groups.place.flatten().long()
    x[place] = torch.randn(400, D, device=DEVICE).bfloat16()
    values, scales = quantise_grouped(x, groups)
    expected_values, expected_scales = quantise_torch(x[place], False)
    # The interpreter forgets to carry: 127.9 becomes 64, not 128.
    is_same = values[place].float() == expected_values.float()
    assert is_same.float().mean() > (0.95 if DEVICE.type == "cpu" else 0.999)
    torch.testing.assert_close(scales[place], expected_scales[:, 0])


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
    hidden = grouped_linear_torch(x, up, groups, "swiglu" if has_gate else "relu_squared", gathered=True)
    outputs = grouped_linear_torch(hidden, down, groups, "none")
    y = sum_outputs(Placed(outputs, groups.place, weight))
    torch.testing.assert_close(y, moe_experts_torch(x, expert.long(), weight, up, down), atol=1e-4, rtol=1e-4)


def test_other_devices_and_dtypes_do_not_fit():
    x, up, down = torch.zeros(4, 64), torch.zeros(2, 128, 64), torch.zeros(2, 64, 64)
    assert not fits_hopper(x.to(DEVICE), Operand(up.to(DEVICE)), Operand(down.to(DEVICE)))
    assert not fits_hopper(x.bfloat16(), Operand(up.bfloat16()), Operand(down.bfloat16()))
