"""FP8 matrices and products of few rows with them, against float64, on a GPU or in the interpreter."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headrace.kernels.dense.fp8 import (
    BLOCK,
    FP8,
    Fp8Matrix,
    quantise_matrix,
    quantise_torch,
    quantise_triton,
    select_rows,
    stack_rows,
)
from headrace.kernels.dense.fp8_rows import Fp8Format, quantise_rows
from headrace.kernels.dense.small_linear import Tile, small_linear_triton
from headrace.kernels.dense.swiglu import swiglu_torch
from tests.kernels.dense.fp8_matrices import GROUPINGS, random_matrix
from tests.kernels.dense.rows import slice_of_projection

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("form", ["plain", "gated", "parts"])
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize(("M", "O", "I", "parts"), [(1, 256, 384, 2), (17, 192, 256, 2), (3, 130, 208, 8)])
def test_products_of_few_rows(M: int, O: int, I: int, parts: int, grouping: str, form: str):  # noqa: E741
    """Eight parts of 208 values: some are empty."""
    x, weight = slice_of_projection(M, I, torch.bfloat16), random_matrix(O, I, grouping)
    tile = Tile(64, 64, parts if form == "parts" else 1, 4, 2)
    y = small_linear_triton(quantise_rows(x, Fp8Format(weight.has_blocks)), weight, form, tile).double()
    values, scales = quantise_torch(x, weight.has_blocks)
    spread = scales.repeat_interleave(BLOCK, 1)[:, :I] if weight.has_blocks else scales
    exact = (values.double() * spread) @ Fp8Matrix(
        weight.values, weight.scales, weight.row_group, torch.float64
    ).dequantised().T
    expected = swiglu_torch(exact) if form == "gated" else exact
    torch.testing.assert_close(y.sum(0) if form == "parts" else y, expected, atol=2e-2, rtol=2e-2)


def test_no_rows():
    x, weight = torch.empty(0, 128, device=DEVICE).bfloat16(), random_matrix(64, 128)
    assert small_linear_triton(quantise_rows(x, Fp8Format(weight.has_blocks)), weight).shape == (0, 64)


def test_rows_and_weight_must_have_scales_of_one_kind():
    x, weight = torch.randn(2, 256, device=DEVICE).bfloat16(), random_matrix(64, 256)
    with pytest.raises(ValueError, match="x has 1 scales a row, the weight 2"):
        small_linear_triton(quantise_rows(x, Fp8Format(by_block=False)), weight)
    with pytest.raises(ValueError, match=r"x in torch.bfloat16 and a weight in FP8 disagree"):
        small_linear_triton(x, weight)


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("width", [128, 200, 384])
def test_rows_are_quantised_to_the_largest_number(width: int, by_block: bool):
    x = torch.randn(3, width, device=DEVICE).bfloat16()
    x[1] = 0
    (values, scales), (expected, expected_scales) = quantise_triton(x, by_block), quantise_torch(x, by_block)
    torch.testing.assert_close(scales, expected_scales)
    assert scales.T.is_contiguous() and expected_scales.T.is_contiguous()
    assert expected.float().abs().amax(1).tolist() == [448, 0, 448]
    # The interpreter forgets to carry: 127.9 becomes 64, not 128.
    assert (values.float() == expected.float()).float().mean() > (0.95 if DEVICE.type == "cpu" else 0.999)


def test_rows_are_selected_where_the_matrix_is():
    with FakeTensorMode():  # shapes and devices alone: there may be no GPU
        weight, rows = torch.empty(8, 16, device="cuda"), torch.arange(4)
        assert select_rows(weight, rows).device.type == "cuda"
        selected = select_rows(Fp8Matrix(weight.to(FP8), torch.empty(8, 1, device="cuda"), 1, torch.float32), rows)
        assert isinstance(selected, Fp8Matrix) and selected.scales.device.type == "cuda"


def test_quantised_rows_keep_their_scales_when_selected_and_stacked():
    matrix = random_matrix(3 * BLOCK, 2 * BLOCK)
    whole_blocks = torch.arange(BLOCK, 3 * BLOCK, device=DEVICE).roll(BLOCK)
    for rows in (whole_blocks, torch.arange(0, 6, 2, device=DEVICE), whole_blocks.flip(0)[: BLOCK + 8]):
        selected = select_rows(matrix, rows)
        assert isinstance(selected, Fp8Matrix) and (selected.row_group == BLOCK) == (rows is whole_blocks)
        assert torch.equal(selected.dequantised(), matrix.dequantised()[rows])
        for other in (matrix, random_matrix(8, 2 * BLOCK, "per channel")):
            stacked = stack_rows([selected, other])
            assert isinstance(stacked, Fp8Matrix)
            assert torch.equal(stacked.dequantised(), torch.cat((selected.dequantised(), other.dequantised())))


def test_a_part_that_is_not_quantised_dequantises_the_others():
    matrix, plain = random_matrix(16, 64), torch.randn(4, 64, device=DEVICE).bfloat16()
    assert torch.equal(stack_rows([matrix, plain]), torch.cat((matrix.dequantised(), plain)))  # type: ignore[arg-type]


def test_a_quantised_matrix_is_close_to_its_original():
    weight = torch.randn(32, 96, device=DEVICE)
    torch.testing.assert_close(quantise_matrix(weight).dequantised(), weight, rtol=0.07, atol=1e-2)
