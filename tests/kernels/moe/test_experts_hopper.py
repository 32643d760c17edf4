"""Experts of grouped rows on Hopper: against float64 on a Hopper GPU, elsewhere that their products compile."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from headrace.kernels.dense.fp8 import quantise_matrix
from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.moe import experts, experts_hopper
from headrace.kernels.moe.experts import Fp8Experts, moe_experts, moe_experts_torch, rows_of
from headrace.kernels.moe.experts_hopper import fits_hopper, moe_experts_hopper
from headrace.kernels.moe.grouped_linear_hopper import Operand
from headrace.kernels.moe.outputs import sum_outputs
from tests.kernels.dense.fp8_matrices import assert_rounded_as_fp8
from tests.kernels.dense.rows import DEVICE, NAN, slice_of_projection
from tests.support.kernels.compiled import SHARED_BYTES_A_BLOCK, compile_for_h200
from tests.support.kernels.launches import GROUPED_FORMS, grouped_linear_launch

needs_hopper = pytest.mark.skipif(
    not runs_hopper(torch.empty(1, dtype=torch.bfloat16, device=DEVICE)), reason="needs a Hopper GPU"
)


SIZES = [(3, 1, 64, 64), (17, 6, 192, 320), (66, 10, 576, 208)]


def operands(
    rows: int, E: int, k: int, D: int, inner: int, has_gate: bool = True, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """No token chooses the last expert, whose weights are NaN."""
    up = (torch.randn(E, (1 + has_gate) * inner, D, device=DEVICE) * D**-0.5).to(dtype)
    down = (torch.randn(E, D, inner, device=DEVICE) * inner**-0.5).to(dtype)
    up[-1] = down[-1] = NAN
    expert = torch.rand(rows, E - 1, device=DEVICE).argsort(-1)[:, :k].int()
    return slice_of_projection(rows, D, dtype, behind=8), expert, torch.rand(rows, k, device=DEVICE), up, down


def check(y: Tensor, x: Tensor, expert: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> None:
    wide = [each.double() for each in (x, weight, up, down)]
    expected = moe_experts_torch(wide[0], expert.long(), *wide[1:])
    torch.testing.assert_close(y.double(), expected, atol=3e-2, rtol=3e-2)


def on_hopper(x: Tensor, expert: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return sum_outputs(moe_experts_hopper(x, expert, weight, Operand(up), Operand(down)))


@needs_hopper
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 63, 65, 129, 1000])
@pytest.mark.parametrize(("E", "k", "D", "inner"), SIZES)
def test_any_number_of_rows(rows: int, E: int, k: int, D: int, inner: int, dtype: torch.dtype, has_gate: bool):
    given = operands(rows, E, k, D, inner, has_gate, dtype)
    check(on_hopper(*given), *given)


@needs_hopper
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("rows", [1, 65, 1000])
@pytest.mark.parametrize(("E", "k", "D", "inner"), [(3, 1, 128, 128), (17, 6, 256, 400)])
def test_experts_in_fp8(rows: int, E: int, k: int, D: int, inner: int, has_gate: bool):
    x, expert, weight, up, down = operands(rows, E, k, D, inner, has_gate)
    up[-1] = down[-1] = 0
    weight = 0.5 + weight  # no choice is too small to be missed
    matrices = [Fp8Experts(quantise_matrix(each.flatten(0, 1)), E) for each in (up, down)]
    y = sum_outputs(moe_experts_hopper(x, expert, weight, *map(rows_of, matrices)))
    wide = [each.matrix.dequantised().view(each.shape).double() for each in matrices]
    expected = moe_experts_torch(x.double(), expert.long(), weight.double(), *wide)
    assert_rounded_as_fp8(y, expected)


@needs_hopper
def test_one_expert_may_get_every_token():
    x, expert, weight, up, down = operands(700, 5, 2, 256, 128)
    expert[:, 0], expert[:, 1] = 1, 3
    check(on_hopper(x, expert, weight, up, down), x, expert, weight, up, down)


@needs_hopper
def test_experts_of_many_rows_take_it(monkeypatch):
    hopper = Mock(side_effect=moe_experts_hopper)
    monkeypatch.setattr(experts, "moe_experts_hopper", hopper)
    given = operands(1000, 9, 2, 256, 128)
    check(sum_outputs(moe_experts(*given)), *given)
    assert hopper.call_count == 1
    given = operands(100, 9, 2, 256, 128)
    check(sum_outputs(moe_experts(*given)), *given)
    assert hopper.call_count == 1


@pytest.mark.parametrize(("E", "k", "D", "inner"), SIZES)
def test_the_operands_above_keep_its_contract(E: int, k: int, D: int, inner: int, monkeypatch):
    """Shown without a GPU, too: tests that no run here reaches could go on with operands that it has come to refuse."""
    monkeypatch.setattr(experts_hopper, "runs_hopper", lambda x: True)
    x, _, _, *matrices = operands(65, E, k, D, inner)
    up, down = map(Operand, matrices)
    assert fits_hopper(x, up, down)
    assert not fits_hopper(slice_of_projection(65, D, x.dtype), up, down)


def test_it_compiles_for_an_h200_without_spills():
    for form, gathered, dtype in GROUPED_FORMS:
        [report] = compile_for_h200([grouped_linear_launch(form, gathered, dtype)])
        assert report.stack_bytes == 0 and report.shared_bytes <= SHARED_BYTES_A_BLOCK, (form, gathered, dtype, report)
        wgmma = "m64n256k16.f32.bf16.bf16" if dtype == "bf16" else "m64n256k32.f32.e4m3.e4m3"
        assert f"wgmma.mma_async.sync.aligned.{wgmma}" in report.ptx
        # Half a tile, where the other half lies past the last column: SwiGLU has both halves everywhere.
        half = wgmma.replace("n256", "n128")
        assert (f"wgmma.mma_async.sync.aligned.{half}" in report.ptx) == (form != "swiglu")
        # Gathered rows: 16 bytes a thread, and an arrival of each of the producer's threads, which the barrier counts.
        assert ("cp.async.cg.shared.global" in report.ptx) == gathered
        assert ("cp.async.mbarrier.arrive.noinc" in report.ptx) == gathered
