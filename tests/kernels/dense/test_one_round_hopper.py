"""Products in one round of programs: against float64 on a Hopper GPU, elsewhere that they compile, and when."""

import re

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.one_round_hopper import (
    MOST_ROWS,
    ROWS_OF_KERNELS,
    Form,
    Share,
    has_one_round,
    is_faster_in_one_round,
    one_round_hopper,
    registers_for,
    share_of,
    x_rows_of,
)
from headrace.kernels.dense.rms_norm import rms_norm
from headrace.kernels.dense.swiglu import swiglu_torch
from headrace.kernels.lib import dispatch
from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.lib.hopper import launch_registers
from headrace.kernels.lib.sizes import MULTIPROCESSORS, cdiv
from tests.kernels.dense.rows import DEVICE, slice_of_projection
from tests.support.kernels.compiled import SHARED_BYTES_A_BLOCK, compile_for_h200
from tests.support.kernels.launches import one_round_launch

FORMS: tuple[Form, ...] = ("plain", "gated", "parts")
BOUND = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
needs_hopper = pytest.mark.skipif(
    not runs_hopper(torch.empty(1, dtype=torch.bfloat16, device=DEVICE)), reason="needs a Hopper GPU"
)
forms = pytest.mark.parametrize("form", FORMS)


def random_weight(width: int, I: int, form: Form, dtype: torch.dtype = torch.bfloat16) -> Tensor:  # noqa: E741
    return (torch.randn(2 * width if form == "gated" else width, I, device=DEVICE) * I**-0.5).to(dtype)


def check(y: Tensor, x: Tensor, weight: Tensor, form: Form) -> None:
    product = x.double() @ weight.double().T
    expected = swiglu_torch(product) if form == "gated" else product
    if form == "parts" and y.dim() == 3:
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double().sum(0), expected, atol=1e-4, rtol=1e-4)
    else:
        assert y.dtype == x.dtype
        torch.testing.assert_close(y.double(), expected, atol=BOUND[x.dtype], rtol=BOUND[x.dtype])


@needs_hopper
@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("M", [1, 16, 17, 33, 64, 65, 129, 192])
@pytest.mark.parametrize(
    ("width", "I"),
    [(8, 64), (64, 128), (1064, 192), (2560, 1024), (3000, 1024), (8192, 320), (9216, 640)],  # with side tiles, too
)
def test_any_number_of_rows(M: int, width: int, I: int, form: Form, dtype: torch.dtype):  # noqa: E741
    """Rows of x and columns of W that are not theirs are NaN or another half's: the last program has some of them."""
    x, weight = slice_of_projection(M, I, dtype, behind=8), random_weight(width, I, form, dtype)
    check(one_round_hopper(x, weight, form), x, weight, form)


@needs_hopper
@forms
@pytest.mark.parametrize("model", SHAPES)
def test_real_shapes_behind_a_norm_again_and_again(model: str, form: Form):
    """A product begins before the norm behind which it stands has ended: it must not read its rows before."""
    config = SHAPES[model]
    weights = [random_weight(config.intermediate_size, config.hidden_size, form) for _ in range(4)]
    norm = torch.rand(config.hidden_size, device=DEVICE)
    for M in (1, 40, 128):
        rows = [torch.randn(M, config.hidden_size, device=DEVICE).bfloat16() for _ in range(16)]
        torch.cuda.synchronize()
        normed = [rms_norm(x, norm, 1e-5) for x in rows]
        torch.cuda.synchronize()
        ends = [one_round_hopper(rms_norm(x, norm, 1e-5), weights[n % 4], form) for n, x in enumerate(rows)]
        for n, y in enumerate(ends):
            check(y, normed[n], weights[n % 4], form)


@needs_hopper
def test_a_gate_far_from_zero_is_open_or_shut():
    x, weight = torch.eye(128, 64, dtype=torch.bfloat16, device=DEVICE), torch.ones(256, 64, device=DEVICE).bfloat16()
    weight[:64], weight[64:128] = 1e4, -1e4
    y = one_round_hopper(x, weight, "gated")[:64]
    assert torch.equal(y, torch.tensor([1e4] * 64 + [0.0] * 64, device=DEVICE).bfloat16().expand(64, 128))


@needs_hopper
@forms
@pytest.mark.parametrize("M", [1, 64, 65, 192, 193])
def test_a_layer_is_right_on_both_sides_of_each_limit(M: int, form: Form):
    weight, x = random_weight(8192, 1024, form), slice_of_projection(M, 1024, torch.bfloat16, behind=8)
    layer = LinearWeight(weight)
    if form == "plain":
        room = torch.full((M * 8192 + 4,), 7.0, device=DEVICE, dtype=torch.bfloat16)
        check(layer(x, room[: M * 8192].view(M, 8192)), x, weight, form)
        assert torch.all(room[M * 8192 :] == 7.0)
        check(layer(x, room[4:].view(M, 8192)), x, weight, form)  # not where the copy engine writes
    else:
        check(layer.swiglu(x) if form == "gated" else layer.parts(x), x, weight, form)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are made as on a Hopper GPU."""
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)


def faster(M: int, outputs: int, form: Form, inputs: int = 2048) -> bool:
    x, weight = (torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta") for rows in (M, outputs))
    return is_faster_in_one_round(x, weight, form)


def test_many_rows_and_small_matrices_take_other_kernels(on_hopper: None):
    assert [faster(M, 18432, "gated") for M in (1, 192, 193)] == [True, True, False]
    assert [faster(M, 10240, "plain") for M in (1, 192, 193)] == [True, True, False]
    assert [faster(M, 12352, "plain") for M in (128, 129)] == [True, False]
    assert [faster(M, 3072, "plain") for M in (64, 128)] == [True, False]
    assert [faster(M, 2048, "parts") for M in (1, 192, 193)] == [True, True, False]
    assert [faster(M, 2560, "parts") for M in (128, 129)] == [True, False]  # 80 columns of a program are two tiles
    assert not faster(1, 512, "plain") and not faster(1, 2048, "parts", 512)
    assert not faster(64, 16384, "plain", 64)  # no program could take its share


@forms
@pytest.mark.parametrize("outputs", [1024, 2048, 2080, 3072, 8512, 12352, 18432])
def test_a_few_numbers_of_rows_meet_all_kernels_that_are_taken(outputs: int, form: Form, on_hopper: None):
    """So a warm-up compiles them."""

    def kernel(M: int) -> tuple[int, int]:
        return cdiv(M, 64), x_rows_of(M)

    met = {kernel(M) for M in ROWS_OF_KERNELS if faster(M, outputs, form)}
    assert {kernel(M) for M in range(1, MOST_ROWS + 8) if faster(M, outputs, form)} == met


def test_other_devices_and_sizes_do_not_fit(on_hopper: None, monkeypatch: pytest.MonkeyPatch):
    x, weight = torch.zeros(100, 128).bfloat16(), torch.zeros(4096, 128).bfloat16()
    assert has_one_round(x, weight, "gated") and is_faster_in_one_round(x, weight, "plain")
    assert not has_one_round(x, weight[:4090], "plain")  # rows of y would begin at odd addresses
    assert not has_one_round(x, weight[:8], "gated")
    assert not has_one_round(torch.zeros(193, 128).bfloat16(), weight, "plain")
    assert not has_one_round(x, torch.zeros(13000, 128).bfloat16(), "plain")
    assert has_one_round(x, torch.zeros(24000, 128).bfloat16(), "gated")
    assert not has_one_round(torch.zeros(192, 128).bfloat16(), torch.zeros(24000, 128).bfloat16(), "gated")  # registers
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: False)
    assert not is_faster_in_one_round(x, weight, "plain")
    with pytest.raises(ValueError, match="Contract"):
        one_round_hopper(x, weight, "plain")


@forms
@pytest.mark.parametrize("width", [8, 64, 1056, 1064, 2048, 2560, 3000, 8192, 8512, 9216, 10240, 12352, 12672])
def test_programs_share_the_columns_in_one_round(width: int, form: Form):
    share = share_of(width, 4096, form)
    assert cdiv(width, share.columns) * share.parts <= MULTIPROCESSORS
    assert (
        share.main.bit_count() == 1 and share.side.bit_count() <= 1 and share.side % 8 == 0 and share.side < share.main
    )
    assert share.parts == 1 or form == "parts"


def test_shares_of_real_shapes():
    assert share_of(8192, 2048, "gated") == Share(64, 0) and share_of(9216, 2560, "gated") == Share(64, 8)
    assert share_of(12352, 2560, "plain") == Share(64, 32)
    assert share_of(2560, 9216, "parts") == Share(64, 16, 4) and share_of(4096, 8192, "parts") == Share(64, 0, 2)
    assert share_of(2560, 192, "parts").parts == 1  # three pieces of W


@pytest.mark.parametrize(("consumers", "num_sums"), [(1, 16), (1, 192), (2, 192), (3, 144)])
def test_registers_are_handed_on_by_the_producer(consumers: int, num_sums: int):
    registers = registers_for(consumers, num_sums)
    assert registers.consumer * consumers + registers.producer == registers.launch * (consumers + 1)
    assert registers.launch <= launch_registers(consumers) and registers.producer >= 32
    assert all(number % 8 == 0 for number in registers)


def test_they_compile_for_an_h200_without_spills():
    sizes: list[tuple[int, int, int, Form]] = [
        (192, 9216, 2560, "gated"),
        (128, 12672, 2560, "gated"),
        (64, 12672, 2560, "gated"),
        (192, 10240, 2560, "plain"),
        (64, 12352, 2560, "plain"),
        (192, 8512, 2048, "plain"),
        (16, 3072, 2048, "plain"),
        (64, 2560, 9216, "parts"),
        (128, 2560, 9216, "parts"),
        (192, 2048, 8192, "parts"),
        (1, 2048, 2048, "parts"),
    ]
    for size, report in zip(sizes, compile_for_h200([one_round_launch(*size) for size in sizes]), strict=True):
        assert report.stack_bytes == 0 and report.shared_bytes <= SHARED_BYTES_A_BLOCK, report
        assert "wgmma.mma_async.sync.aligned.m64n" in report.ptx
        # A warp waits for its own products alone, and then y takes the place of what other warps may yet read.
        ends = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+0;(.*?)stmatrix", report.ptx, flags=re.DOTALL)
        assert ends or size[-1] == "parts"
        assert all("bar.sync" in end for end in ends), size
        assert report.accesses("st.global") == (["v2.b32"] if size[-1] == "parts" else []), size
