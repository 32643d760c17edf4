"""Rows of states in one byte an element: close to what they were, alike in torch and in Triton."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.kernels.transfer.state_rows import (
    dequantise_rows,
    dequantise_rows_torch,
    dequantise_rows_triton,
    quantise_rows,
    quantise_rows_torch,
    quantise_rows_triton,
)
from tests.support.kernels.compiled import compile_for_h200
from tests.support.kernels.launches import state_rows_launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLEMENTATIONS = pytest.mark.parametrize(
    "quantise, dequantise",
    [(quantise_rows_torch, dequantise_rows_torch), (quantise_rows_triton, dequantise_rows_triton)],
    ids=["torch", "triton"],
)
FORMATS = pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
# Of the row's largest and of the value itself, when that is rounded to nearest.
MOST_OFF = {torch.int8: (0.5 / 127, 0.0), torch.float8_e4m3fn: (2**-10 / 448, 2**-4)}


def quantised(rows: Tensor, dtype: torch.dtype, quantise: Callable = quantise_rows) -> tuple[Tensor, Tensor]:
    values = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    scales = torch.full(rows.shape[:1], torch.nan, device=rows.device)
    quantise(rows, values, scales)
    return values, scales


def random_rows(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different magnitudes, the first one of zeros."""
    rows = torch.randn(num_rows, num_columns, device=DEVICE) * 10.0 ** torch.randint(
        -6, 6, (num_rows, 1), device=DEVICE
    )
    rows[:1] = 0
    return rows.to(dtype)


@IMPLEMENTATIONS
@FORMATS
@pytest.mark.parametrize("shape", [(3, 1), (37, 16), (5, 48), (19, 128), (2, 300)], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_each_value_is_within_half_a_step_of_its_row(quantise, dequantise, dtype, shape: tuple[int, int], wide):
    if wide is torch.bfloat16 and quantise is quantise_rows_triton and DEVICE.type == "cpu":
        pytest.skip("the interpreter holds bfloat16 as integers")
    rows = random_rows(*shape, dtype=wide)
    values, scales = quantised(rows, dtype, quantise)
    back = torch.full_like(rows, torch.nan)
    dequantise(values, scales, back)
    of_largest, of_value = MOST_OFF[dtype]
    if dtype is torch.float8_e4m3fn and quantise is quantise_rows_triton and DEVICE.type == "cpu":
        of_value = 0.5  # the interpreter's conversion forgets to carry
    allowed = of_largest * rows.float().abs().amax(1, keepdim=True) + of_value * rows.float().abs()
    if wide is torch.bfloat16:
        allowed += 2**-8 * rows.float().abs()
    assert ((back.float() - rows.float()).abs() <= allowed * 1.001).all()
    assert torch.equal(back[0], torch.zeros_like(back[0]))


@IMPLEMENTATIONS
@FORMATS
def test_what_was_packed_once_does_not_change_any_more(quantise, dequantise, dtype):
    if dtype is torch.float8_e4m3fn and quantise is quantise_rows_triton and DEVICE.type == "cpu":
        pytest.skip("the interpreter's conversion to e4m3 forgets to carry")
    rows = random_rows(23, 128)
    first, first_scales = quantised(rows, dtype, quantise)
    dequantise(first, first_scales, rows)
    for _ in range(8):
        again, scales = quantised(rows, dtype, quantise)
        dequantise(again, scales, rows)
    assert torch.equal(again.view(torch.int8), first.view(torch.int8))
    assert torch.allclose(scales, first_scales, rtol=1e-6, atol=0)


@IMPLEMENTATIONS
def test_no_rows_are_nothing_to_do(quantise, dequantise):
    none = random_rows(0, 8)
    values, scales = quantised(none, torch.int8, quantise)
    dequantise(values, scales, none)


def test_values_and_scales_must_fit_the_rows():
    rows = random_rows(4, 8)
    values, scales = quantised(rows, torch.int8)
    with pytest.raises(ValueError, match="a scale for each row"):
        quantise_rows(rows, values, scales[:3])
    with pytest.raises(ValueError, match="int8 or float8_e4m3fn"):
        dequantise_rows(values.to(torch.int16), scales, rows)
    with pytest.raises(ValueError, match="contiguous"):
        quantise_rows(random_rows(8, 4).t(), values, scales)


@pytest.mark.slow
def test_rows_travel_in_words_of_sixteen_bytes():
    names, launches = zip(*state_rows_launches(), strict=True)
    for name, report in zip(names, compile_for_h200(launches), strict=True):
        assert report.stack_bytes == 0, name
        accesses = report.accesses("ld.global" if name.startswith("quantise") else "st.global")
        assert "v4.b32" in accesses, (name, accesses)
