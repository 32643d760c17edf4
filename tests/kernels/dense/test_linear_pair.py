"""Two products of the same few rows in one launch, against each alone, on a GPU or in the interpreter."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.dense import linear
from headrace.kernels.dense.fp8 import Fp8Matrix
from headrace.kernels.dense.fp8_rows import Fp8Format, Fp8Rows, quantise_rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.linear_pair import linear_pair_triton
from headrace.kernels.dense.small_linear import Tile, small_linear_triton
from headrace.kernels.lib.dispatch import is_hopper
from headrace.kernels.lib.sizes import cdiv
from tests.kernels.dense.fp8_matrices import GROUPINGS, random_matrix
from tests.kernels.dense.rows import slice_of_projection
from tests.support.kernels.compiled import SHARED_BYTES_A_BLOCK, compile_for_h200
from tests.support.kernels.launches import pair_launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILE = Tile(64, 64, 1, 4, 2)


def operands(M: int, O: int, P: int, I: int, grouping: str) -> tuple[Fp8Rows, Fp8Matrix, Tensor]:  # noqa: E741
    weight = random_matrix(O, I, grouping)
    x = quantise_rows(slice_of_projection(M, I, weight.dtype), Fp8Format(weight.has_blocks, keeps_plain=True))
    return x, weight, (torch.randn(P, I, device=DEVICE) * I**-0.5).to(weight.dtype)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize(("M", "O", "P", "I"), [(1, 256, 64, 384), (17, 192, 6, 256), (3, 130, 40, 208)])
def test_both_products_are_those_of_each_alone(M: int, O: int, P: int, I: int, grouping: str):  # noqa: E741
    x, weight, side = operands(M, O, P, I, grouping)
    y, side_y = linear_pair_triton(x, weight, side, TILE)
    assert torch.equal(y, small_linear_triton(x, weight, tile=TILE))
    assert x.plain is not None
    torch.testing.assert_close(side_y.double(), x.plain.double() @ side.double().T, atol=2e-2, rtol=2e-2)


def test_no_rows():
    y, side_y = linear_pair_triton(*operands(0, 64, 16, 128, "per channel"))
    assert y.shape == (0, 64) and side_y.shape == (0, 16)


def test_what_is_no_such_pair_is_refused():
    x, weight, side = operands(2, 64, 16, 128, "per channel")
    with pytest.raises(ValueError, match="disagree"):
        linear_pair_triton(x, weight, side[:, :64].contiguous())
    with pytest.raises(ValueError, match="no gaps"):
        linear_pair_triton(x, weight, side.float())
    with pytest.raises(ValueError, match="in FP8 alone"):
        linear_pair_triton(Fp8Rows(x.values, x.scales, len(x)), weight, side)


@pytest.mark.parametrize("rows", [1, 64, 65])
@pytest.mark.parametrize("num_side", [16, 513])
def test_matrices_multiply_beside_each_other_as_alone(rows: int, num_side: int, monkeypatch: pytest.MonkeyPatch):
    """Of many rows, or with a large second matrix, they are two launches; without a Hopper GPU two products, too."""
    launched = []
    monkeypatch.setattr(linear, "linear_pair_triton", lambda *pair: launched.append(1) or linear_pair_triton(*pair))
    matrix = random_matrix(64, 128, "per channel")
    first = LinearWeight(matrix)
    side = LinearWeight((torch.randn(num_side, 128, device=DEVICE) * 128**-0.5).to(matrix.dtype))
    x = torch.randn(rows, 128, device=DEVICE).to(matrix.dtype)
    fmt = linear.read_by(first, side)
    y, side_y = first.beside(x if fmt is None else quantise_rows(x, fmt), side)
    torch.testing.assert_close(y, first(x), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(side_y, side(x), atol=1e-2, rtol=1e-2)
    assert len(launched) == (is_hopper(DEVICE) and rows <= 64 and num_side <= 512)


@pytest.mark.slow
@pytest.mark.parametrize("grouping", ["per channel", "blocks"])
def test_an_h200_gets_both_without_spills(grouping: str):
    """Qwen3.5-4B's: the delta rule's projection beside its decays, 384 programs of it all resident at once."""
    launches = [pair_launch(12288, 2560, 64, M, random_matrix(256, 256, grouping)) for M in (1, 16, 64)]
    for launch, report in zip(launches, compile_for_h200(launches), strict=True):
        assert report.stack_bytes == 0 and report.shared_bytes <= SHARED_BYTES_A_BLOCK, report
        programs = cdiv(12288, launch.constexprs["COLUMNS"]) + launch.constexprs["SIDE_PROGRAMS"]
        assert programs <= 132 * report.resident_warps // launch.num_warps, report
