"""Logits in float32 against torch, on a GPU or in the interpreter."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.sampling.widen import widened_torch, widened_triton
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rows_of(N: int, V: int, dtype: torch.dtype) -> Tensor:
    """Columns of a wider tensor that is NaN behind them."""
    wide = torch.full((N, V + 5), float("nan"), dtype=dtype, device=DEVICE)
    wide[:, :V] = torch.randn(N, V, device=DEVICE)
    return wide[:, :V]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [None, [], [2], [2, 0, 2, 1]])
@pytest.mark.parametrize("V", [1, 63, 64, 65, 700])
def test_rows_are_taken_and_divided(V: int, index: list[int] | None, dtype: torch.dtype):
    rows = rows_of(3, V, dtype)
    picked = None if index is None else torch.tensor(index, dtype=torch.int64, device=DEVICE)
    expected = (rows if picked is None else rows[picked]).float() / 6.0
    torch.testing.assert_close(widened_triton(rows, 6.0, picked, block=64), expected, rtol=1e-6, atol=0.0)
    assert torch.equal(widened_torch(rows, 6.0, picked), expected)


@pytest.mark.parametrize("index", [None, torch.tensor([0])])
@pytest.mark.parametrize("divisor", [1.0, 6.0])
def test_the_result_may_be_changed(divisor: float, index: Tensor | None):
    rows = torch.randn(1, 8)
    before = rows.clone()
    widened_torch(rows, divisor, index).zero_()
    assert torch.equal(rows, before)


def test_no_rows():
    assert widened_triton(torch.empty(0, 7, device=DEVICE), 6.0).shape == (0, 7)


def test_gaps_in_a_row_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        widened_triton(torch.zeros(7, 5, device=DEVICE).T, 6.0)


@pytest.mark.parametrize("picks", [False, True])
def test_an_h200_reads_and_writes_sixteen_bytes_at_a_time(picks: bool):
    types = {"rows_ptr": "*bf16:16", "out_ptr": "*fp32:16", "V": "i32:16", "stride_rows": "i32:16", "divisor": "fp32"}
    types |= {"index_ptr": "*i64:16"} if picks else {}
    constexprs = {"BLOCK": 2048} | ({} if picks else {"index_ptr": None})
    [report] = compile_for_h200([Launch("headrace.kernels.sampling.widen:_widen_kernel", types, constexprs)])
    assert {"v4.b32"} <= set(report.accesses("ld.global")) and set(report.accesses("st.global")) == {"v4.b32"}
    assert report.stack_bytes == 0
