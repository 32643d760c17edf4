"""The Triton kernels of row operations and experts against their torch references, on a GPU or in the interpreter."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.dense.gated_rms_norm import (
    gate_then_norm_torch,
    gate_then_norm_triton,
    norm_then_gate_torch,
    norm_then_gate_triton,
)
from headrace.kernels.dense.rms_norm import add_rms_norm_torch, add_rms_norm_triton, rms_norm_torch, rms_norm_triton
from headrace.kernels.dense.swiglu import swiglu_torch, swiglu_triton
from headrace.kernels.moe.experts import MoeTile, moe_experts_torch, moe_experts_triton, moe_tile
from headrace.kernels.moe.routing import moe_route_torch, moe_route_triton
from tests.support.kernels.compiled import compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: too large for the interpreter")

# Rows, width: one row and many, widths that fill a tile, that leave some of it empty, and real ones.
SHAPES = [(0, 40), (1, 40), (5, 64), (37, 40), (3, 130)]
if DEVICE.type == "cuda":
    SHAPES += [(1, 2048), (65, 2560), (300, 4096), (2, 12000)]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def slice_of_projection(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Columns of a wider tensor, which is NaN around them."""
    wide = torch.full((rows, width + 11), NAN, dtype=dtype, device=DEVICE)
    wide[:, 8 : 8 + width] = torch.randn(rows, width, device=DEVICE)
    return wide[:, 8 : 8 + width]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = 1e-5 if actual.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), expected.double(), atol=bound, rtol=bound)


@dtypes
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype):
    x, weight = slice_of_projection(rows, width, dtype), torch.rand(width, device=DEVICE)
    assert_close(rms_norm_triton(x, weight, 1e-3), rms_norm_torch(x, weight, 1e-3))


@dtypes
def test_rms_norm_with_a_weight_for_each_head(dtype: torch.dtype):
    x, weight = torch.randn(7, 3, 40, device=DEVICE).to(dtype), torch.rand(3, 40, device=DEVICE)
    assert_close(rms_norm_triton(x, weight, 1e-3), rms_norm_torch(x, weight, 1e-3))


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


@dtypes
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_gate_then_norm(rows: int, width: int, groups: int, dtype: torch.dtype):
    x, gate = torch.randn(rows, width, device=DEVICE).to(dtype), slice_of_projection(rows, width, dtype)
    weight = torch.rand(width, device=DEVICE)
    actual = gate_then_norm_triton(x, gate, weight, 1e-3, groups)
    assert_close(actual, gate_then_norm_torch(x, gate, weight, 1e-3, groups))


@dtypes
@pytest.mark.parametrize(("rows", "heads", "width"), [(0, 3, 8), (1, 3, 8), (9, 3, 24), (63, 4, 128)])
def test_norm_then_gate(rows: int, heads: int, width: int, dtype: torch.dtype):
    x = torch.randn(rows, heads, width, device=DEVICE).to(dtype)
    gate = slice_of_projection(rows, heads * width, dtype).view(rows, heads, width)
    weight = torch.rand(width, device=DEVICE)
    assert_close(norm_then_gate_triton(x, gate, weight, 1e-3), norm_then_gate_torch(x, gate, weight, 1e-3))


@dtypes
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_swiglu(rows: int, width: int, dtype: torch.dtype):
    gate_up = slice_of_projection(rows, 2 * width, dtype)
    assert_close(swiglu_triton(gate_up, block=64 if width < 200 else 2048), swiglu_torch(gate_up))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("rows", "experts", "k"), [(0, 4, 2), (1, 6, 2), (9, 72, 10), (5, 3, 3)])
def test_routing(rows: int, experts: int, k: int, renormalize: bool):
    logits = torch.randn(rows, experts + 3, device=DEVICE)[:, :experts]
    weight, expert = moe_route_triton(logits, k, renormalize)
    expected_weight, expected_expert = moe_route_torch(logits, k, renormalize)
    assert torch.equal(expert.long(), expected_expert)
    torch.testing.assert_close(weight, expected_weight)


def check_experts(rows: int, E: int, k: int, D: int, inner: int, dtype: torch.dtype, tile: MoeTile | None) -> None:
    """Nobody chooses the last expert, whose weights are NaN."""
    x = slice_of_projection(rows, D, dtype)
    gate_up = (torch.randn(E, 2 * inner, D, device=DEVICE) * D**-0.5).to(dtype)
    down = (torch.randn(E, D, inner, device=DEVICE) * inner**-0.5).to(dtype)
    gate_up[-1] = down[-1] = NAN
    expert = torch.rand(rows, E - 1, device=DEVICE).argsort(-1)[:, :k]
    weight = torch.rand(rows, k, device=DEVICE).to(dtype)
    actual = moe_experts_triton(x, expert, weight, gate_up, down, tile)
    wide = [t.double() for t in (x, gate_up, down)]
    expected = moe_experts_torch(wide[0], expert, weight.double(), *wide[1:])
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual.double(), expected, atol=bound, rtol=bound)


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
def test_experts_serve_each_token_its_own_choice(rows: int, dtype: torch.dtype):
    check_experts(rows, 5, 2, 64, 48, dtype, MoeTile(16, 32, 32, 4, 2))


@needs_gpu
@pytest.mark.parametrize("rows", [1, 63, 256, 3000])
@pytest.mark.parametrize(("E", "k", "D", "inner"), [(65, 6, 1536, 512), (257, 8, 2048, 512)])
def test_experts_of_real_shapes(rows: int, E: int, k: int, D: int, inner: int):
    check_experts(rows, E, k, D, inner, torch.bfloat16, None)


def test_all_tokens_may_choose_the_same_experts():
    x, weight = torch.randn(40, 16, device=DEVICE), torch.ones(40, 1, device=DEVICE)
    gate_up, down = torch.randn(4, 32, 16, device=DEVICE), torch.randn(4, 16, 16, device=DEVICE)
    expert = torch.full((40, 1), 2, device=DEVICE)
    actual = moe_experts_triton(x, expert, weight, gate_up, down, moe_tile(10, torch.float32))
    torch.testing.assert_close(actual, moe_experts_torch(x, expert, weight, gate_up, down), atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_kernels_compile_for_an_h200_without_spilling():
    from tests.support.kernels.launches import row_launches

    for report in compile_for_h200([launch for _, launch in row_launches()]):
        assert report.stack_bytes == 0 and report.shared_bytes <= 227 * 1024
