"""Future tokens in Triton against the reference."""

import pytest
import torch

from headrace.kernels.sampling.future_tokens import resolve_future_tokens_torch, resolve_future_tokens_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 256])
def test_tokens_come_from_the_draws_where_they_have_a_source(num_rows: int):
    source = torch.randint(-1, 7, (num_rows,), device=DEVICE)
    known = torch.randint(0, 100, (num_rows, 3), device=DEVICE)[:, 1]
    drawn = torch.randint(100, 200, (7,), device=DEVICE)
    expected = resolve_future_tokens_torch(known, source, drawn)
    assert torch.equal(resolve_future_tokens_triton(known, source, drawn), expected)
