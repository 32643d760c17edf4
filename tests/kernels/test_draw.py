"""Drawing without sorting against drawing from sorted probabilities."""

import pytest
import torch
from torch import Tensor

from kernels.draw import draw_torch, draw_triton
from tests.support.compiled import Launch, compile_for_h200

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


def check(logits: Tensor, numbers: Tensor) -> None:
    """Each row with all settings and numbers."""
    cases = [(row, setting, number) for row in logits for setting in SETTINGS for number in numbers.tolist()]
    rows = torch.stack([row for row, _, _ in cases])
    settings = torch.tensor([setting for _, setting, _ in cases], dtype=torch.float64, device=DEVICE)
    uniform = torch.tensor([number for _, _, number in cases], dtype=torch.float64, device=DEVICE)
    actual, expected = draw_triton(rows, settings, uniform, block=64), draw_torch(rows, settings, uniform)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_the_same_tokens_as_from_sorted_probabilities(spread: float):
    torch.manual_seed(0)
    check(torch.randn(1, VOCABULARY, device=DEVICE) * spread, torch.tensor([0.0, 0.03, 0.47, 0.999999]))


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
    [report] = compile_for_h200([Launch("kernels.draw:_draw_kernel", types, {"BLOCK": 8192}, num_warps=16)])
    assert report.stack_bytes == 0
