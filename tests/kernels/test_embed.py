"""What a step begins with: its tokens and their embeddings."""

import pytest
import torch

from headrace.kernels.dense.embed import embed_torch, embed_triton
from headrace.kernels.sampling.future_tokens import resolve_future_tokens_torch, resolve_future_tokens_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65])
@pytest.mark.parametrize("width", [1, 48, 2560])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multiplier", [1.0, 12.0])
def test_rows_of_the_embedding(num_tokens: int, width: int, dtype: torch.dtype, multiplier: float):
    embedding = torch.randn(17, width, device=DEVICE).to(dtype)
    tokens = torch.randint(0, 17, (num_tokens, 2), device=DEVICE)[:, 1]  # as a row of fields: every second one
    expected = embed_torch(tokens, embedding, multiplier)
    # To the last bit on a GPU; the interpreter cuts bfloat16 off where others round.
    torch.testing.assert_close(embed_triton(tokens, embedding, multiplier), expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 256])
def test_tokens_come_from_the_draws_where_fed(num_rows: int):
    source = torch.randint(-1, 7, (num_rows,), device=DEVICE)
    known = torch.randint(0, 100, (num_rows, 3), device=DEVICE)[:, 1]
    drawn = torch.randint(100, 200, (7,), device=DEVICE)
    expected = resolve_future_tokens_torch(known, source, drawn)
    assert torch.equal(resolve_future_tokens_triton(known, source, drawn), expected)
