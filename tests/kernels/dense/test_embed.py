"""Token embedding in Triton against its reference."""

import pytest
import torch

from headrace.kernels.dense.embed import embed_torch, embed_triton
from headrace.kernels.sampling.argmax import NO_TOKEN

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


def test_no_token_reads_as_the_first_one():
    embedding = torch.randn(5, 24, device=DEVICE)
    tokens = torch.tensor([3, NO_TOKEN, 4], device=DEVICE)
    for embed in (embed_torch, embed_triton):
        assert torch.equal(embed(tokens, embedding, 1.0), embedding[[3, 0, 4]])
