"""Drawing without sorting against drawing from sorted probabilities."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.sampling.argmax import NO_TOKEN
from headrace.kernels.sampling.draw import draw_torch, draw_triton
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 7, 0.5, 0.0),
    (2.0, 0, 1.0, 0.2),
    (1.0, 9, 0.9, 0.1),
    (1.0, 1, 1.0, 0.0),
    (0.01, 0, 0.999, 0.0),
    (1.0, 10**6, 1e-9, 0.0),
]
VOCABULARY = 100_000 if DEVICE.type == "cuda" else 150
# Of a row's mass. A number this close to where one token's share ends may draw its neighbour: the kernel adds float32
# weights. Among many tokens the last ones have less than that each, and no number near one is a test of them.
MARGIN = 3e-7


def check(logits: Tensor, numbers: Tensor) -> None:
    """Every row with every setting and number."""
    cases = [(row, setting, number) for row in logits for setting in SETTINGS for number in numbers.tolist()]
    rows = torch.stack([row for row, _, _ in cases])
    settings = torch.tensor([setting for _, setting, _ in cases], dtype=torch.float64, device=DEVICE)
    uniform = torch.tensor([number for _, _, number in cases], dtype=torch.float64, device=DEVICE)
    expected = draw_torch(rows, settings, uniform)
    for error in (-MARGIN, MARGIN):
        assert torch.equal(draw_torch(rows, settings, (uniform + error).clamp_(0, 1 - MARGIN)), expected)
        nudged = torch.where(settings < 1, settings + error, settings)
        cut_elsewhere = torch.stack((settings[:, 0], settings[:, 1], nudged[:, 2], settings[:, 3]), dim=1)
        assert torch.equal(draw_torch(rows, cut_elsewhere, uniform), expected)
    assert torch.equal(draw_triton(rows, settings, uniform, block=64), expected)


@pytest.mark.parametrize(
    ("spread", "vocabulary", "last"), [(0.1, VOCABULARY, 0.999999), (3.0, VOCABULARY, 0.9), (3.0, 150, 0.9999)]
)
def test_the_same_tokens_as_from_sorted_probabilities(spread: float, vocabulary: int, last: float):
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0)) * spread
    check(logits.to(DEVICE), torch.tensor([0.0, 0.03, 0.47, last]))


def test_equal_logits_are_taken_by_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, -torch.inf, 2.0, 1.0, -torch.inf, 1.0]], device=DEVICE)
    check(logits, torch.tensor([0.1, 0.35, 0.55, 0.8, 0.97]))


def test_a_slice_of_the_logits_and_no_rows():
    torch.manual_seed(1)
    logits = torch.randn(4, 70, device=DEVICE)[::2, 3:60]
    settings = torch.tensor(SETTINGS[:2], dtype=torch.float64, device=DEVICE)
    uniform = torch.tensor([0.3, 0.6], dtype=torch.float64, device=DEVICE)
    assert torch.equal(draw_triton(logits, settings, uniform), draw_torch(logits, settings, uniform))
    assert draw_triton(logits[:0], settings[:0], uniform[:0]).shape == (0,)


def test_the_kernel_compiles_for_an_h200_without_spilling():
    types = {"logits_ptr": "*fp32:16", "settings_ptr": "*fp64:16", "uniform_ptr": "*fp64:16", "id_ptr": "*i64:16"}
    types |= {"V": "i32:16", "stride_logits": "i32:16"}
    constexprs = {"NO_TOKEN": NO_TOKEN, "LARGEST": 3.4e38, "BLOCK": 8192}
    [report] = compile_for_h200(
        [Launch("headrace.kernels.sampling.draw:_draw_kernel", types, constexprs, num_warps=16)]
    )
    assert report.stack_bytes == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_row_without_a_softmax_has_no_token(setting: tuple[float, int, float, float]):
    logits = torch.randn(6, 150, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    logits[1, 97], logits[2], logits[3, 97], logits[4, 3:9] = torch.nan, torch.nan, torch.inf, torch.inf
    logits[5] = torch.inf
    settings = torch.tensor([setting] * 6, dtype=torch.float64, device=DEVICE)
    uniform = torch.tensor([0.4] * 6, dtype=torch.float64, device=DEVICE)
    first, *others = draw_torch(logits, settings, uniform).tolist()
    assert first >= 0 and others == [NO_TOKEN] * 5
    assert draw_triton(logits, settings, uniform, block=64).tolist() == [first, *others]
