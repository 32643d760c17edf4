"""Rows that are computed in FP8: as if they had been computed in 16 bits and quantised behind."""

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from headrace.kernels.dense.fp8 import FP8, quantise_torch, quantise_triton
from headrace.kernels.dense.fp8_rows import Fp8Format, Fp8Rows, groups_fit, plain_rows, quantise_rows
from headrace.kernels.dense.gated_rms_norm import (
    gate_then_norm_fp8_triton,
    gate_then_norm_rows,
    gate_then_norm_triton,
    norm_then_gate_fp8_triton,
    norm_then_gate_rows,
    norm_then_gate_triton,
)
from headrace.kernels.dense.relu_squared import relu_squared_fp8_triton, relu_squared_rows, relu_squared_triton
from headrace.kernels.dense.rms_norm import (
    add_rms_norm_fp8_triton,
    add_rms_norm_rows,
    add_rms_norm_triton,
    rms_norm_fp8_triton,
    rms_norm_rows,
    rms_norm_triton,
)
from headrace.kernels.dense.swiglu import swiglu_fp8_triton, swiglu_rows, swiglu_triton
from headrace.kernels.lib.sizes import next_power_of_2
from tests.kernels.dense.rows import DEVICE, slice_of_projection

BY_ROW, BY_BLOCK = Fp8Format(False), Fp8Format(True)
FORMATS = [fmt._replace(keeps_plain=keeps) for fmt in (BY_ROW, BY_BLOCK) for keeps in (False, True)]
formats = pytest.mark.parametrize("fmt", FORMATS, ids=str)
Quantise: TypeAlias = Callable[[Tensor, bool], tuple[Tensor, Tensor]]
ROWS, EPS = [0, 1, 5], 1e-3
# Widths of whole blocks: a power of two, and one that leaves a part of the tile empty; real ones.
WIDTHS = [256, 384] + ([2048, 2560, 8192] if DEVICE.type == "cuda" else [])


def check(rows: Fp8Rows, expected: Tensor, fmt: Fp8Format, quantise: Quantise = quantise_triton) -> None:
    """`rows` are `expected`, quantised. On a GPU a norm of several heads may sum in another order."""
    values, scales = quantise(expected, fmt.by_block)
    M = len(expected)
    assert len(rows) == M and rows.values.dtype == FP8 and rows.scales.t().is_contiguous()
    assert len(rows.values) == len(rows.scales) and (not fmt.by_block or len(rows.values) % 4 == 0)
    torch.testing.assert_close(rows.scales[:M], scales, rtol=0.01, atol=0)
    torch.testing.assert_close(rows.scales[:M].mean(), scales.mean(), rtol=1e-5, atol=0, equal_nan=True)
    same = rows.values[:M].view(torch.uint8) == values.view(torch.uint8)
    assert M == 0 or same.float().mean() > 0.999
    assert (rows.plain is not None) == fmt.keeps_plain
    if rows.plain is not None:
        torch.testing.assert_close(rows.plain, expected, rtol=0.01, atol=1e-4)
        values, scales = quantise(rows.plain, fmt.by_block)  # bit by bit, wherever the largest values were found
        assert torch.equal(rows.scales[:M], scales)
        assert torch.equal(rows.values[:M].view(torch.uint8), values.view(torch.uint8))


def quantise_of(heads: int, width: int, fmt: Fp8Format) -> Quantise:
    """A launch of its own quantises rows whose blocks cross heads: without a GPU it is no launch."""
    if DEVICE.type == "cpu" and not groups_fit(heads, width, next_power_of_2(width), fmt):
        return quantise_torch
    return quantise_triton


@formats
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int, M: int, fmt: Fp8Format):
    x, weight = slice_of_projection(M, width, torch.bfloat16), torch.rand(width, device=DEVICE)
    check(rms_norm_fp8_triton(x, weight, EPS, fmt), rms_norm_triton(x, weight, EPS), fmt)
    for branch in (slice_of_projection(M, width, torch.bfloat16), torch.randn(2, M, width, device=DEVICE)):
        total, rows = add_rms_norm_fp8_triton(x, branch, 0.22, weight, EPS, fmt)
        expected_total, expected = add_rms_norm_triton(x, branch, 0.22, weight, EPS)
        assert torch.equal(total, expected_total)
        check(rows, expected, fmt)


@formats
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize(("width", "groups"), [(256, 1), (384, 1), (512, 4), (768, 2), (1152, 3), (768, 4)])
def test_a_gate_before_the_norm(width: int, groups: int, M: int, fmt: Fp8Format):
    """Groups of 128, 384 and 192 values: of the last ones, blocks do not lie in one group."""
    x, gate = torch.randn(M, width, device=DEVICE).bfloat16(), slice_of_projection(M, width, torch.bfloat16)
    for weight in (torch.rand(width, device=DEVICE), None):
        expected = gate_then_norm_triton(x, gate, weight, EPS, groups)
        rows = gate_then_norm_fp8_triton(x, gate, weight, EPS, groups, fmt)
        check(rows, expected, fmt, quantise_of(groups, width // groups, fmt))


@formats
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize(("heads", "width"), [(4, 128), (3, 128), (4, 64), (6, 64), (2, 384), (4, 96)])
def test_a_gate_behind_each_heads_norm(heads: int, width: int, M: int, fmt: Fp8Format):
    x, weight = torch.randn(M, heads, width, device=DEVICE).bfloat16(), torch.rand(width, device=DEVICE)
    gate = slice_of_projection(M, heads * width, torch.bfloat16).view(M, heads, width)
    for sigmoid in (False, True):
        expected = norm_then_gate_triton(x, gate, weight, EPS, sigmoid).flatten(1)
        rows = norm_then_gate_fp8_triton(x, gate, weight, EPS, fmt, sigmoid)
        check(rows, expected, fmt, quantise_of(heads, width, fmt))


@formats
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_activations(width: int, M: int, fmt: Fp8Format):
    gate_up = slice_of_projection(M, 2 * width, torch.bfloat16)
    check(swiglu_fp8_triton(gate_up, fmt), swiglu_triton(gate_up), fmt)
    x = slice_of_projection(M, width, torch.bfloat16)
    check(relu_squared_fp8_triton(x, fmt), relu_squared_triton(x), fmt)


@pytest.mark.parametrize("fmt", [None, BY_BLOCK._replace(keeps_plain=True)], ids=str)
def test_operations_give_the_format_that_is_asked_for(fmt: Fp8Format | None):
    x, weight = torch.randn(3, 256, device=DEVICE).bfloat16(), torch.rand(256, device=DEVICE)
    heads, per_head = x.view(3, 2, 128), torch.rand(128, device=DEVICE)
    made: list[Callable[[], object]] = [
        lambda: rms_norm_rows(x, weight, EPS, fmt),
        lambda: add_rms_norm_rows(x, x, 1.0, weight, EPS, fmt)[1],
        lambda: gate_then_norm_rows(x, x, weight, EPS, 1, fmt),
        lambda: norm_then_gate_rows(heads, heads, per_head, EPS, fmt),
        lambda: swiglu_rows(torch.cat((x, x), 1), fmt),
        lambda: relu_squared_rows(x, fmt),
    ]
    for make in made:
        rows = make()
        assert isinstance(rows, Tensor if fmt is None else Fp8Rows)
        if isinstance(rows, Fp8Rows):
            assert rows.plain is not None
            values, scales = quantise_rows(rows.plain, BY_BLOCK).values, quantise_rows(rows.plain, BY_BLOCK).scales
            assert torch.equal(rows.values[:3].view(torch.uint8), values[:3].view(torch.uint8))
            assert torch.equal(rows.scales[:3], scales[:3])


@pytest.mark.parametrize("fmt", [BY_ROW, BY_BLOCK._replace(keeps_plain=True)], ids=str)
def test_selected_rows_keep_their_scales(fmt: Fp8Format):
    x = torch.randn(7, 256, device=DEVICE).bfloat16()
    chosen = torch.tensor([6, 0, 3, 3, 1], device=DEVICE)
    selected, expected = quantise_rows(x, fmt).select(chosen), quantise_rows(x[chosen], fmt)
    assert len(selected) == 5 and selected.values.shape == expected.values.shape
    assert selected.scales.stride() == expected.scales.stride()
    assert torch.equal(selected.values[:5].view(torch.uint8), expected.values[:5].view(torch.uint8))
    assert torch.equal(selected.scales[:5], expected.scales[:5])
    assert (selected.plain is not None) == fmt.keeps_plain
    if selected.plain is not None:
        assert torch.equal(selected.plain, x[chosen])


def test_rows_in_fp8_alone_have_no_16_bits():
    x = torch.randn(2, 128, device=DEVICE).bfloat16()
    assert plain_rows(x) is x and plain_rows(quantise_rows(x, BY_ROW._replace(keeps_plain=True))) is x
    with pytest.raises(ValueError, match="2 rows of 128 are in FP8 alone"):
        plain_rows(quantise_rows(x, BY_ROW))
