"""Products in one round of programs: against float64 on a Hopper GPU, elsewhere that they compile, and when."""

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.one_round_hopper import (
    MOST_ROWS,
    Share,
    fewest_rows,
    has_one_round,
    is_faster_in_one_round,
    one_round_hopper,
    share_of,
)
from headrace.kernels.dense.rms_norm import rms_norm
from headrace.kernels.dense.swiglu import swiglu_torch
from headrace.kernels.lib import dispatch
from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.lib.sizes import MULTIPROCESSORS, cdiv
from tests.kernels.dense.rows import DEVICE, slice_of_projection
from tests.support.kernels.compiled import SHARED_BYTES_A_BLOCK, compile_for_h200
from tests.support.kernels.launches import one_round_launch

BOUND = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
needs_hopper = pytest.mark.skipif(
    not runs_hopper(torch.empty(1, dtype=torch.bfloat16, device=DEVICE)), reason="needs a Hopper GPU"
)
forms = pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])


def random_weight(width: int, I: int, is_gated: bool, dtype: torch.dtype = torch.bfloat16) -> Tensor:  # noqa: E741
    return (torch.randn(2 * width if is_gated else width, I, device=DEVICE) * I**-0.5).to(dtype)


def check(y: Tensor, x: Tensor, weight: Tensor, is_gated: bool) -> None:
    product = x.double() @ weight.double().T
    expected = swiglu_torch(product) if is_gated else product
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.double(), expected, atol=BOUND[x.dtype], rtol=BOUND[x.dtype])


@needs_hopper
@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("M", [1, 63, 64, 65, 128, 129, 191, 192])
@pytest.mark.parametrize(
    ("width", "I"),
    [(8, 64), (64, 128), (1064, 192), (3000, 1024), (8192, 320), (9216, 640), (12352, 64)],  # the last ones: side tiles
)
def test_any_number_of_rows(M: int, width: int, I: int, is_gated: bool, dtype: torch.dtype):  # noqa: E741
    """Rows of x and columns of W that are not theirs are NaN or another half's: the last program has some of them."""
    x, weight = slice_of_projection(M, I, dtype, behind=8), random_weight(width, I, is_gated, dtype)
    check(one_round_hopper(x, weight, is_gated), x, weight, is_gated)


@needs_hopper
@pytest.mark.parametrize("model", SHAPES)
def test_real_shapes_behind_a_norm_again_and_again(model: str):
    """A product begins before the norm behind which it stands has ended: it must not read its rows before."""
    config = SHAPES[model]
    weights = [random_weight(config.intermediate_size, config.hidden_size, True) for _ in range(4)]
    norm = torch.rand(config.hidden_size, device=DEVICE)
    for M in (40, 128, 192):
        rows = [torch.randn(M, config.hidden_size, device=DEVICE).bfloat16() for _ in range(16)]
        torch.cuda.synchronize()
        normed = [rms_norm(x, norm, 1e-5) for x in rows]
        torch.cuda.synchronize()
        ends = [one_round_hopper(rms_norm(x, norm, 1e-5), weights[n % 4], True) for n, x in enumerate(rows)]
        for n, y in enumerate(ends):
            check(y, normed[n], weights[n % 4], True)


@needs_hopper
def test_a_gate_far_from_zero_is_open_or_shut():
    x, weight = torch.eye(128, 64, dtype=torch.bfloat16, device=DEVICE), torch.ones(256, 64, device=DEVICE).bfloat16()
    weight[:64], weight[64:128] = 1e4, -1e4
    y = one_round_hopper(x, weight, True)[:64]
    assert torch.equal(y, torch.tensor([1e4] * 64 + [0.0] * 64, device=DEVICE).bfloat16().expand(64, 128))


@needs_hopper
@forms
@pytest.mark.parametrize("M", [16, 17, 32, 33, 192, 193])
def test_a_layer_is_right_on_both_sides_of_each_limit(M: int, is_gated: bool):
    weight, x = random_weight(8192, 256, is_gated), slice_of_projection(M, 256, torch.bfloat16, behind=8)
    layer = LinearWeight(weight)
    check(layer.swiglu(x) if is_gated else layer(x), x, weight, is_gated)
    if not is_gated:
        room = torch.full((M + 1, 8192), 7.0, device=DEVICE, dtype=torch.bfloat16)
        check(layer(x, room[:M]), x, weight, is_gated)
        assert torch.all(room[M] == 7.0)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are made as on a Hopper GPU."""
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)


def faster(M: int, O: int, I: int, is_gated: bool) -> bool:  # noqa: E741
    return is_faster_in_one_round(torch.zeros(M, I).bfloat16(), torch.zeros(O, I).bfloat16(), is_gated)


def test_few_rows_and_many_and_narrow_matrices_take_other_kernels(on_hopper: None):
    assert [faster(M, 18432, 64, True) for M in (16, 17, 192, 193)] == [False, True, True, False]
    assert [faster(M, 10240, 64, False) for M in (32, 33, 192, 193)] == [False, True, True, False]
    assert [faster(M, 12352, 64, False) for M in (128, 129)] == [True, False]
    assert [faster(M, 3072, 64, False) for M in (64, 128)] == [True, False]
    assert not faster(64, 248320, 64, False)  # a head: no program could take its share


@forms
@pytest.mark.parametrize("outputs", [1024, 2048, 3072, 8512, 12352, 18432])
def test_the_fewest_rows_of_each_kernel_meet_all_that_are_taken(outputs: int, is_gated: bool, on_hopper: None):
    """So a warm-up compiles them."""
    met = {cdiv(M, 64) for M in fewest_rows() if faster(M, outputs, 64, is_gated)}
    assert {cdiv(M, 64) for M in range(1, MOST_ROWS + 8) if faster(M, outputs, 64, is_gated)} == met


def test_other_devices_and_sizes_do_not_fit(on_hopper: None, monkeypatch: pytest.MonkeyPatch):
    x, weight = torch.zeros(100, 128).bfloat16(), torch.zeros(4096, 128).bfloat16()
    assert has_one_round(x, weight, True) and is_faster_in_one_round(x, weight, False)
    assert not has_one_round(x, weight[:4090], False)  # rows of y would begin at odd addresses
    assert not has_one_round(x, weight[:8], True)
    assert not has_one_round(torch.zeros(193, 128).bfloat16(), weight, False)
    assert not has_one_round(x, torch.zeros(13000, 128).bfloat16(), False)
    assert has_one_round(x, torch.zeros(24000, 128).bfloat16(), True)
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: False)
    assert not is_faster_in_one_round(x, weight, False)
    with pytest.raises(ValueError, match="Contract"):
        one_round_hopper(x, weight, False)


@pytest.mark.parametrize("width", [8, 64, 1056, 1064, 3000, 8192, 8512, 9216, 10240, 12352, 16896])
def test_programs_share_the_columns_in_one_round(width: int):
    share = share_of(width)
    assert cdiv(width, share.columns) <= MULTIPROCESSORS
    assert (
        share.main.bit_count() == 1 and share.side.bit_count() <= 1 and share.side % 8 == 0 and share.side < share.main
    )


def test_shares_of_real_shapes():
    assert share_of(8192) == Share(64, 0) and share_of(9216) == Share(64, 8) and share_of(12352) == Share(64, 32)


def test_they_compile_for_an_h200_without_spills():
    sizes = [(192, 9216, True), (128, 9216, True), (64, 8192, True), (192, 10240, False), (64, 12352, False)]
    for report in compile_for_h200([one_round_launch(*size) for size in sizes]):
        assert report.stack_bytes == 0 and report.shared_bytes <= SHARED_BYTES_A_BLOCK, report
        assert "wgmma.mma_async.sync.aligned.m64n" in report.ptx
