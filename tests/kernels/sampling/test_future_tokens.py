"""A decode step's fields with its future tokens in Triton against the reference."""

import pytest
import torch

from headrace.kernels.sampling.future_tokens import (
    resolve_future_tokens,
    resolve_future_tokens_torch,
    resolve_future_tokens_triton,
)
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 129, 256])
@pytest.mark.parametrize(("token", "source"), [(0, 1), (4, 2)])
def test_tokens_come_from_the_draws_where_they_have_a_source(num_rows: int, token: int, source: int):
    fields = torch.randint(-1, 100, (5, num_rows + 3), dtype=torch.int32, device=DEVICE)[:, 1 : num_rows + 1]
    fields[source] = torch.randint(-1, 7, (num_rows,), device=DEVICE)
    drawn = torch.randint(100, 2**40, (7,), device=DEVICE)
    expected = fields.long()
    for n, place in enumerate(fields[source].tolist()):
        if place >= 0:
            expected[token, n] = drawn[place]
    for resolve in (resolve_future_tokens_torch, resolve_future_tokens_triton):
        assert torch.equal(resolve(fields, drawn, token, source), expected)
    assert torch.equal(resolve_future_tokens(fields, drawn, token=token, source=source), expected)


def test_fields_with_gaps_or_of_another_kind_are_refused():
    fields, drawn = torch.zeros(8, 4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    for wrong, draws in ((fields.long(), drawn), (fields.T, drawn), (fields[0], drawn), (fields, drawn.int())):
        with pytest.raises(ValueError, match="fields"):
            resolve_future_tokens(wrong, draws, token=0, source=1)


def test_it_compiles_without_a_stack():
    types = {
        "fields_ptr": "*i32:16",
        "drawn_ptr": "*i64:16",
        "out_ptr": "*i64:16",
        "N": "i32",
        "stride_fields": "i32:16",
    }
    kernel = "headrace.kernels.sampling.future_tokens:_future_tokens_kernel"
    [report] = compile_for_h200([Launch(kernel, types, {"TOKEN": 0, "SOURCE": 1, "BLOCK": 128})])
    assert report.stack_bytes == 0 and report.registers <= 64
