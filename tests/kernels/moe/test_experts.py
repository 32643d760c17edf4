"""A mixture's experts: the reference against its definition, Triton against the reference."""

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.moe.experts import (
    Fp8Experts,
    MoeTile,
    moe_experts,
    moe_experts_torch,
    moe_experts_triton,
    moe_tile,
)
from tests.kernels.dense.fp8_matrices import GROUPINGS, assert_rounded_as_fp8, random_matrix
from tests.kernels.dense.rows import DEVICE, NAN, dtypes, slice_of_projection

ROWS = [0, 1, 63, 65]


@pytest.mark.parametrize("rows", ROWS)
def test_each_token_gets_its_own_choice(rows: int):
    E, inner, D, k = 5, 6, 8, 2
    x, gate_up, down = torch.randn(rows, D), torch.randn(E, 2 * inner, D), torch.randn(E, D, inner)
    expert = torch.rand(rows, E - 1).argsort(-1)[:, :k]  # nobody chooses the last expert
    gate_up[-1] = down[-1] = float("nan")
    weight = torch.rand(rows, k)
    y = moe_experts(x, expert, weight, gate_up, down).sum(1)
    for t in range(rows):
        parts = [F.linear(x[t], gate_up[e]).chunk(2) for e in expert[t]]
        each = [F.linear(F.silu(g) * u, down[e]) for (g, u), e in zip(parts, expert[t], strict=True)]
        torch.testing.assert_close(y[t], sum(w * o for w, o in zip(weight[t], each, strict=True)))


def test_experts_without_a_gate_square_what_is_positive():
    x, up, down = torch.randn(7, 8), torch.randn(5, 6, 8), torch.randn(5, 8, 6)
    expert, weight = torch.rand(7, 5).argsort(-1)[:, :2], torch.rand(7, 2)
    y = moe_experts(x, expert, weight, up, down).sum(1)
    for t in range(7):
        each = [down[e] @ (up[e] @ x[t]).clamp(min=0).square() for e in expert[t]]
        torch.testing.assert_close(y[t], sum(w * o for w, o in zip(weight[t], each, strict=True)))


needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: too large for the interpreter")


def check_experts(
    rows: int, E: int, k: int, D: int, inner: int, dtype: torch.dtype, tile: MoeTile | None, has_gate: bool = True
) -> None:
    """No token chooses the last expert, whose weights are NaN."""
    x = slice_of_projection(rows, D, dtype)
    gate_up = (torch.randn(E, (1 + has_gate) * inner, D, device=DEVICE) * D**-0.5).to(dtype)
    down = (torch.randn(E, D, inner, device=DEVICE) * inner**-0.5).to(dtype)
    gate_up[-1] = down[-1] = NAN
    expert = torch.rand(rows, E - 1, device=DEVICE).argsort(-1)[:, :k]
    weight = torch.rand(rows, k, device=DEVICE)  # as routers give it
    actual = moe_experts_triton(x, expert, weight, gate_up, down, tile).sum(1)
    wide = [t.double() for t in (x, gate_up, down)]
    expected = moe_experts_torch(wide[0], expert, weight.double(), *wide[1:])
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual.double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("has_gate", [True, False])
def test_experts_in_fp8(has_gate: bool, grouping: str):
    E, k, D, inner = 4, 2, 256, 128
    x, expert = torch.randn(9, D, device=DEVICE).bfloat16(), torch.rand(9, E, device=DEVICE).argsort(-1)[:, :k]
    weight = 0.5 + torch.rand(9, k, device=DEVICE)  # no choice is too small to be missed
    up = Fp8Experts(random_matrix(E * (1 + has_gate) * inner, D, grouping), E)
    down = Fp8Experts(random_matrix(E * D, inner, grouping), E)
    actual = moe_experts_triton(x, expert, weight, up, down, MoeTile(16, 32, 64, 4, 2)).sum(1)
    wide = [each.matrix.dequantised().view(each.shape).double() for each in (up, down)]
    expected = moe_experts_torch(x.double(), expert, weight.double(), *wide)
    assert_rounded_as_fp8(actual, expected)


@dtypes
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
def test_each_token_gets_its_own_choice_in_triton(rows: int, has_gate: bool, dtype: torch.dtype):
    check_experts(rows, 5, 2, 64, 48, dtype, MoeTile(16, 32, 32, 4, 2), has_gate)


@needs_gpu
@pytest.mark.parametrize("rows", [1, 63, 256, 3000])
@pytest.mark.parametrize(("E", "k", "D", "inner"), [(65, 6, 1536, 512), (257, 8, 2048, 512)])
def test_experts_of_real_shapes(rows: int, E: int, k: int, D: int, inner: int):
    check_experts(rows, E, k, D, inner, torch.bfloat16, None)


@pytest.mark.parametrize(("rows", "k"), [(2, 2), (5, 1)])
def test_few_entries_of_few_experts(rows: int, k: int):
    """No more entries than experts: an expert of several has as many places for tiles, and one tile."""
    x, weight = torch.randn(rows, 16, device=DEVICE), torch.rand(rows, k, device=DEVICE)
    gate_up, down = torch.randn(5, 32, 16, device=DEVICE), torch.randn(5, 16, 16, device=DEVICE)
    expert = torch.tensor([3, 1][:k], device=DEVICE).expand(rows, k)
    actual = moe_experts_triton(x, expert, weight, gate_up, down).sum(1)
    torch.testing.assert_close(actual, moe_experts_torch(x, expert, weight, gate_up, down), atol=1e-3, rtol=1e-4)


def test_all_tokens_may_choose_the_same_experts():
    x, weight = torch.randn(40, 16, device=DEVICE), torch.ones(40, 1, device=DEVICE)
    gate_up, down = torch.randn(4, 32, 16, device=DEVICE), torch.randn(4, 16, 16, device=DEVICE)
    expert = torch.full((40, 1), 2, device=DEVICE)
    actual = moe_experts_triton(x, expert, weight, gate_up, down, moe_tile(10, torch.float32)).sum(1)
    torch.testing.assert_close(actual, moe_experts_torch(x, expert, weight, gate_up, down), atol=1e-3, rtol=1e-4)
