"""Greedy draws against torch, on a GPU or in the interpreter."""

import pytest
import torch

from headrace.kernels.sampling.argmax import NO_TOKEN, argmax, argmax_triton
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF = float("inf")


def places(rows: list[list[float]] | torch.Tensor, chunk: int = 4, ids: torch.Tensor | None = None) -> list[int]:
    logits = torch.as_tensor(rows, device=DEVICE)
    out = torch.full((2 * len(logits),), -7, dtype=torch.int64, device=DEVICE)
    argmax_triton(logits, out[::2], ids, chunk)
    assert (out[1::2] == -7).all()
    return out[::2].tolist()


def test_the_first_of_equal_values_in_one_chunk_and_across():
    assert places([[1, 5, 5, 0, 5.0], [0, 0, 0, 0, 0.0], [0, 1, 2, 3, 4.0]]) == [1, 0, 4]


def test_a_row_may_be_mostly_minus_infinity():
    assert places([[-INF, -INF, -INF, -INF, -INF, -2.0, -INF], [-INF, -3.0, -INF, -INF, -INF, -INF, -4.0]]) == [5, 1]


@pytest.mark.parametrize("V", [1, 4095, 4096, 4097, 100_352])
def test_random_rows(V: int):
    torch.manual_seed(V)
    wide = torch.full((3, V + 5), INF, device=DEVICE)
    wide[:, :V] = torch.randn(3, V, device=DEVICE).bfloat16().float()
    rows = wide[:, :V]
    assert places(rows, 4096) == [int((row == row.max()).nonzero()[0]) for row in rows]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_sixteen_bits_have_the_first_best_of_their_logits(dtype: torch.dtype):
    """Rounding makes ties, and the division by 6 no others."""
    rows = torch.randn(8, 20_000, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE, dtype)
    assert (rows == rows.amax(1, keepdim=True)).sum() > len(rows)
    assert places(rows, 4096) == (rows.float() / 6).argmax(1).tolist()
    out = torch.empty(8, dtype=torch.int64, device=DEVICE)
    argmax(rows, out)
    assert out.tolist() == places(rows, 4096)


def test_what_stands_at_the_index():
    ids = torch.tensor([100_000, 7, 9, 2, 5], device=DEVICE)
    rows = torch.tensor([[1, 5, 5, 0, 5.0], [0, 0, 0, 1, 0.0], [0, 1, 2, 3, 4.0]], device=DEVICE)
    assert places(rows, ids=ids) == [7, 2, 5]
    out = torch.empty(3, dtype=torch.int64, device=DEVICE)
    argmax(rows, out, ids)
    assert out.tolist() == [7, 2, 5]


def test_no_rows():
    assert places(torch.empty(0, 8)) == []


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="disagree"):
        argmax(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_an_h200_reads_sixteen_bytes_at_a_time(dtype: str):
    types = {"logits_ptr": f"*{dtype}:16", "best_ptr": "*fp32:16", "place_ptr": "*i32:16"}
    types |= {"V": "i32:16", "stride_logits": "i32:16"}
    [report] = compile_for_h200(
        [Launch("headrace.kernels.sampling.argmax:_chunk_kernel", types, {"LARGEST": 3.4e38, "CHUNK": 4096})]
    )
    assert report.accesses("ld.global") == ["v4.b32"] and report.stack_bytes == 0


@pytest.mark.parametrize("has_ids", [False, True])
def test_both_forms_of_the_last_step_compile_for_an_h200(has_ids: bool):
    types = {"best_ptr": "*fp32:16", "place_ptr": "*i32:16", "out_ptr": "*i64", "stride_out": "i32", "chunks": "i32"}
    constexprs: dict[str, object] = {"NO_TOKEN": NO_TOKEN, "BLOCK": 64} | ({} if has_ids else {"ids_ptr": None})
    types |= {"ids_ptr": "*i64:16"} if has_ids else {}
    (report,) = compile_for_h200(
        [Launch("headrace.kernels.sampling.argmax:_best_kernel", types, constexprs, num_warps=1)]
    )
    assert report.stack_bytes == 0


@pytest.mark.parametrize("at", [0, 3, 4, 5, 9])
def test_a_row_with_a_nan_has_no_token(at: int):
    """Whatever else is in it; infinity, which overflows give, is a number."""
    rows = torch.zeros(4, 10)
    rows[1, at] = float("nan")
    rows[1, 7] = rows[2, 6] = rows[2, 8] = INF
    rows[3] = float("nan")
    assert places(rows) == [0, NO_TOKEN, 6, NO_TOKEN]
    assert places(rows, ids=torch.arange(10, 20, device=DEVICE)) == [10, NO_TOKEN, 16, NO_TOKEN]
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(4, dtype=torch.int64, device=DEVICE)
        argmax(rows.to(DEVICE, dtype), out)
        assert out.tolist() == [0, NO_TOKEN, 6, NO_TOKEN]
