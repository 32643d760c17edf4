"""Norms, rotation, projections, experts and staging copies: operations on rows, against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.attention.rotary import inverse_frequencies, rotary_angles, rotate_
from headrace.kernels.dense.gated_rms_norm import gate_then_norm, norm_then_gate
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.rms_norm import l2_normalize, rms_norm
from headrace.kernels.moe.experts import moe_experts
from headrace.kernels.transfer.gather_scatter import gather_rows, scatter_rows

ROWS = [0, 1, 63, 65]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(rows: int, dtype: torch.dtype):
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


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("groups", [1, 4])
def test_gate_then_norm(rows: int, groups: int):
    wide = torch.randn(rows, 70)
    x, gate, weight = torch.randn(rows, 40), wide[:, 5:45], torch.randn(40)
    gated = (x * F.silu(gate)).double().view(rows, groups, 40 // groups)
    normed = gated * (gated.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    before = wide.clone()
    y = gate_then_norm(x, gate, weight, 1e-3, groups)
    torch.testing.assert_close(y.double(), normed.view(rows, 40) * weight.double(), atol=1e-5, rtol=1e-5)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("rows", ROWS)
def test_norm_then_gate(rows: int):
    x, gate, weight = torch.randn(rows, 3, 8), torch.randn(rows, 3, 8), torch.randn(8)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
    y = norm_then_gate(x, gate, weight, 1e-3)
    torch.testing.assert_close(y.double(), normed * F.silu(gate.double()), atol=1e-5, rtol=1e-5)


def test_rotation_turns_pairs_and_leaves_the_rest():
    x = torch.randn(5, 2, 12)
    before = x.clone()
    positions = torch.tensor([0, 1, 7, 100, 4000])
    rotate_(x, *rotary_angles(positions, inverse_frequencies(8, 10000.0, x.device)))
    frequencies = torch.tensor([10000.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    turn = torch.polar(torch.ones(5, 4, dtype=torch.float64), positions[:, None] * frequencies)[:, None]
    expected = torch.complex(before[..., :4].double(), before[..., 4:8].double()) * turn
    torch.testing.assert_close(x[..., :4].double(), expected.real, atol=1e-3, rtol=0)
    torch.testing.assert_close(x[..., 4:8].double(), expected.imag, atol=1e-3, rtol=0)
    assert torch.equal(x[..., 8:], before[..., 8:])
    assert torch.equal(x[0], before[0])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_weight_multiplies_like_the_plain_matrix(rows: int, dtype: torch.dtype):
    x, weight = torch.randn(rows, 50).to(dtype)[:, 3:33], torch.randn(70, 30).to(dtype)
    y = LinearWeight(weight)(x)
    assert y.shape == (rows, 70) and y.dtype == dtype
    bound = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), atol=bound, rtol=0.01)


@pytest.mark.parametrize("rows", ROWS)
def test_experts_serve_each_token_its_own_choice(rows: int):
    E, inner, D, k = 5, 6, 8, 2
    x, gate_up, down = torch.randn(rows, D), torch.randn(E, 2 * inner, D), torch.randn(E, D, inner)
    expert = torch.rand(rows, E - 1).argsort(-1)[:, :k]  # nobody chooses the last expert
    gate_up[-1] = down[-1] = float("nan")
    weight = torch.rand(rows, k)
    y = moe_experts(x, expert, weight, gate_up, down)
    for t in range(rows):
        parts = [F.linear(x[t], gate_up[e]).chunk(2) for e in expert[t]]
        each = [F.linear(F.silu(g) * u, down[e]) for (g, u), e in zip(parts, expert[t], strict=True)]
        torch.testing.assert_close(y[t], sum(w * o for w, o in zip(weight[t], each, strict=True)))


@pytest.mark.parametrize("ids", [[], [3], [5, 0, 6, 1]], ids=str)
def test_staging_round_trip_is_bit_exact(ids: list[int]):
    pool = torch.randint(0, 256, (7, 33), dtype=torch.uint8)
    rows = torch.tensor(ids, dtype=torch.int64)
    staging = torch.zeros(len(ids) * 33, dtype=torch.uint8)
    gather_rows(pool, rows, staging)
    assert torch.equal(staging.view(-1, 33), pool[rows])
    other = torch.zeros_like(pool)
    scatter_rows(other, rows, staging)
    assert torch.equal(other[rows], pool[rows])
    untouched = [i for i in range(7) if i not in ids]
    assert not other[untouched].any()


def test_staging_of_the_wrong_size_is_refused():
    pool, rows = torch.zeros(7, 33, dtype=torch.uint8), torch.tensor([1, 2])
    for copy in (gather_rows, scatter_rows):
        with pytest.raises(ValueError, match=r"not \[66\] uint8"):
            copy(pool, rows, torch.zeros(65, dtype=torch.uint8))
