"""SwiGLU's product and gate in one Hopper kernel: against float64 on a Hopper GPU, elsewhere that it compiles."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from headrace.kernels.dense import linear
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.swiglu import swiglu_torch
from headrace.kernels.dense.swiglu_linear_hopper import (
    fills_the_chip,
    fits_hopper,
    has_whole_tiles,
    is_faster_on_hopper,
    swiglu_linear_hopper,
)
from headrace.kernels.lib.dispatch import runs_hopper
from tests.support.kernels.compiled import SHARED_BYTES_A_BLOCK, compile_for_h200
from tests.support.kernels.launches import swiglu_linear_launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
BOUND = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
needs_hopper = pytest.mark.skipif(
    not runs_hopper(torch.empty(1, dtype=torch.bfloat16, device=DEVICE)), reason="needs a Hopper GPU"
)


def operands(M: int, O: int, I: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:  # noqa: E741
    """x, columns of a wider tensor that is NaN around them; the weight."""
    wide = torch.full((M, I + 24), NAN, dtype=dtype, device=DEVICE)
    wide[:, 8 : 8 + I] = torch.randn(M, I, device=DEVICE)
    weight = torch.randn(2 * O, I, device=DEVICE) * I**-0.5
    return wide[:, 8 : 8 + I], weight.to(dtype)


def check(y: Tensor, x: Tensor, weight: Tensor) -> None:
    expected = swiglu_torch(x.double() @ weight.double().t())
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.double(), expected, atol=BOUND[x.dtype], rtol=BOUND[x.dtype])


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("M", [1, 63, 64, 65, 128, 129, 2049])
@pytest.mark.parametrize(("O", "I"), [(128, 64), (384, 192), (2048, 1024)])
def test_any_number_of_rows(M: int, O: int, I: int, dtype: torch.dtype):  # noqa: E741
    x, weight = operands(M, O, I, dtype)
    check(swiglu_linear_hopper(x, weight), x, weight)


@needs_hopper
@pytest.mark.parametrize("num_pieces", [1, 3, 5])
def test_pieces_of_one_tile_end_in_any_slot_and_the_next_ones_follow(num_pieces: int):
    x, weight = operands(2049, 2048, 64 * num_pieces)  # 272 tiles, two or three a program
    check(swiglu_linear_hopper(x, weight), x, weight)


@needs_hopper
@pytest.mark.parametrize("model", SHAPES)
def test_real_shapes_with_more_tiles_than_programs(model: str):
    config = SHAPES[model]
    x, weight = operands(4100, config.intermediate_size, config.hidden_size)
    check(swiglu_linear_hopper(x, weight), x, weight)


@needs_hopper
def test_a_gate_far_from_zero_is_open_or_shut():
    x, weight = torch.eye(128, 64, dtype=torch.bfloat16, device=DEVICE), torch.ones(256, 64, device=DEVICE).bfloat16()
    weight[:64], weight[64:128] = 1e4, -1e4
    y = swiglu_linear_hopper(x, weight)[:64]
    assert torch.equal(y, torch.tensor([1e4] * 64 + [0.0] * 64, device=DEVICE).bfloat16().expand(64, 128))


@needs_hopper
def test_a_layer_of_many_rows_takes_it(monkeypatch):
    """Fewer rows, which would leave programs idle, take the library's product."""
    config = SHAPES["granite-h-micro"]
    x, weight = operands(2048, config.intermediate_size, config.hidden_size)
    layer = LinearWeight(weight)
    hopper = Mock(side_effect=swiglu_linear_hopper)
    monkeypatch.setattr(linear, "swiglu_linear_hopper", hopper)
    check(layer.swiglu(x), x, weight)
    assert hopper.call_count == 1
    check(layer.swiglu(x[:100]), x[:100], weight)
    assert hopper.call_count == 1


def test_work_is_enough_when_the_last_round_is_nearly_full():
    granite, qwen = (SHAPES[model].intermediate_size for model in ("granite-h-micro", "qwen35-4b"))
    assert [fills_the_chip(M, granite, 132) for M in (128, 256, 512, 1024, 8192)] == [False, True, True, True, True]
    assert [fills_the_chip(M, qwen, 132) for M in (128, 256, 512, 1024, 2048)] == [False, False, False, True, True]


def test_other_devices_and_dtypes_do_not_fit():
    x, weight = operands(200, 128, 64, torch.float32)
    assert not fits_hopper(x, weight)
    x, weight = x.bfloat16().cpu(), weight.bfloat16().cpu()
    assert not fits_hopper(x, weight) and not is_faster_on_hopper(x, weight)
    with pytest.raises(ValueError, match="use the library"):
        swiglu_linear_hopper(x, weight)


def test_half_of_a_weight_is_whole_tiles():
    x, weight = torch.zeros(200, 64).bfloat16(), torch.zeros(512, 64).bfloat16()
    assert has_whole_tiles(x, weight) and not has_whole_tiles(x, weight[:384]) and not has_whole_tiles(x, weight[:0])


def test_it_compiles_for_an_h200_without_spills():
    for report in compile_for_h200([swiglu_linear_launch("bf16"), swiglu_linear_launch("fp16")]):
        assert report.stack_bytes == 0 and report.shared_bytes <= SHARED_BYTES_A_BLOCK, report
        assert "wgmma.mma_async.sync.aligned.m64n256k16" in report.ptx
