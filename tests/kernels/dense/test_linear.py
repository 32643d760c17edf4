"""Packed projections against the plain matrix."""

import pytest
import torch

from headrace.kernels.dense import linear
from headrace.kernels.dense.fp8 import BLOCK, Fp8Matrix, quantise_matrix
from headrace.kernels.dense.fp8_linear import fp8_linear_torch
from headrace.kernels.dense.linear import QUANTISED_ROWS, LinearWeight, num_parts
from headrace.kernels.lib.dispatch import is_hopper
from tests.kernels.dense.fp8_matrices import random_matrix

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = [0, 1, 63, 65]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_weight_multiplies_like_the_plain_matrix(rows: int, dtype: torch.dtype):
    x, weight = torch.randn(rows, 50).to(dtype)[:, 3:33], torch.randn(70, 30).to(dtype)
    y = LinearWeight(weight)(x)
    assert y.shape == (rows, 70) and y.dtype == dtype
    bound = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), atol=bound, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_in_fp8_multiplies_nearly_alike_or_is_the_matrix_itself(dtype: torch.dtype):
    """More rows than are quantised at once. Only a Hopper GPU has products in FP8."""
    weight = LinearWeight(torch.randn(QUANTISED_ROWS + 160, 64, device=DEVICE).to(dtype))
    copy, x = weight.in_fp8(), torch.randn(3, 64, device=DEVICE).to(dtype)
    if dtype == torch.float32 or not is_hopper(DEVICE):
        assert copy is weight
        return
    assert copy.reads is not None and weight.reads is None
    error = (copy(x) - weight(x)).norm() / weight(x).norm()
    assert 0 < error < 0.05


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_where_they_are_wanted(rows: int, dtype: torch.dtype):
    weight, x = LinearWeight(torch.randn(70, 64, device=DEVICE).to(dtype)), torch.randn(rows, 64, device=DEVICE)
    room = torch.full((rows + 1, 70), 7.0, device=DEVICE, dtype=dtype)
    y = weight(x.to(dtype), room[:rows])
    assert y.data_ptr() == room[:rows].data_ptr()
    assert torch.equal(y, weight(x.to(dtype)))
    assert torch.all(room[rows] == 7.0)
    with pytest.raises(ValueError, match=r"out \("):
        weight(x.to(dtype), room)


@pytest.mark.parametrize("matrix", [torch.Tensor.float, torch.Tensor.bfloat16, lambda x: quantise_matrix(x.bfloat16())])
def test_some_rows_of_a_matrix_multiply_alone(matrix):
    weight = LinearWeight(matrix(torch.randn(64, 64, device=DEVICE)))
    x = torch.randn(3, 64, device=DEVICE).to(torch.float32 if matrix is torch.Tensor.float else torch.bfloat16)
    torch.testing.assert_close(weight.of_rows(16, 48)(x), weight(x)[:, 16:48], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "FP8"])
def test_rows_are_replaced_by_another_matrixs(form: str, monkeypatch: pytest.MonkeyPatch):
    """In place: captured products read the same memory. FP8 as on a Hopper GPU."""
    monkeypatch.setattr(linear, "has_product", lambda weight: True)
    monkeypatch.setattr(linear, "fp8_linear", fp8_linear_torch)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    plain, other = (torch.randn(64, 64, device=DEVICE).to(dtype) for _ in range(2))
    make = quantise_matrix if form == "FP8" else torch.clone
    weight, x = LinearWeight(make(plain)), torch.randn(3, 64, device=DEVICE).to(dtype)
    before, into, out_of = weight(x), torch.tensor([5, 60, 7], device=DEVICE), torch.tensor([1, 2, 63], device=DEVICE)
    memory = data_of(weight)
    weight.replace_rows(into, LinearWeight(other).rows(out_of))
    after = weight(x)
    torch.testing.assert_close(after[:, into], LinearWeight(make(other))(x)[:, out_of])
    kept = [row for row in range(64) if row not in into]
    assert torch.equal(after[:, kept], before[:, kept])
    assert data_of(weight) == memory


def data_of(weight: LinearWeight) -> int:
    matrix = weight._weight
    return (matrix.values if isinstance(matrix, Fp8Matrix) else matrix).data_ptr()


def test_some_rows_of_a_matrix_in_16_bits_stay_where_they_are():
    plain = torch.randn(64, 64, device=DEVICE).bfloat16()
    part = LinearWeight(plain).of_rows(16, 48)._weight
    assert isinstance(part, torch.Tensor) and part.data_ptr() == plain[16:].data_ptr()


def test_some_rows_of_a_matrix_in_fp8_blocks_keep_its_blocks(monkeypatch: pytest.MonkeyPatch):
    """Else their product would want rows in 16 bits, which nothing keeps for it."""
    monkeypatch.setattr(linear, "has_product", lambda matrix: matrix.row_group == BLOCK)
    matrix = random_matrix(4 * BLOCK, 4 * BLOCK)
    whole = LinearWeight(matrix)
    part = whole.of_rows(BLOCK, 3 * BLOCK)
    assert isinstance(part._weight, Fp8Matrix) and part.reads == whole.reads
    assert torch.equal(part._weight.dequantised(), matrix.dequantised()[BLOCK : 3 * BLOCK])


@pytest.mark.parametrize(
    ("rows", "out", "deep", "expected"),
    [(65, 2048, 8192, 4), (256, 2048, 8192, 4), (256, 2560, 9216, 2), (257, 2048, 8192, 0), (256, 2560, 4096, 0)],
)
def test_deep_matrices_are_split_while_multiprocessors_would_idle(rows: int, out: int, deep: int, expected: int):
    assert num_parts(rows, out, deep) == expected


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: torch sums in float32 there alone")
@pytest.mark.parametrize("rows", [65, 200, 256])
def test_parts_of_deep_matrices_sum_to_the_product(rows: int):
    plain = (torch.randn(512, 2048, device=DEVICE) * 2048**-0.5).bfloat16()
    weight, x = LinearWeight(plain), torch.randn(rows, 2048, device=DEVICE).bfloat16()
    parts, total = weight.parts(x), torch.zeros(rows, 512, device=DEVICE).bfloat16()
    assert parts.shape == (4, rows, 512) and parts.dtype == torch.float32 and not weight.add_to(total, x, 1.0)
    torch.testing.assert_close(parts.sum(0).double(), x.double() @ plain.double().T, atol=1e-5, rtol=1e-5)
