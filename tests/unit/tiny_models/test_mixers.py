"""The chunk forms used in training compute what transformers computes."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tiny_models.train.architectures import initial_granite, initial_qwen
from tiny_models.train.mixers import CHUNK, use_chunked_mixers


@pytest.mark.parametrize("make", [initial_granite, initial_qwen])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_chunked_mixers_equal_transformers(make: Callable[[], PreTrainedModel], num_chunks: int) -> None:
    model = make().eval()
    tokens = torch.randint(0, model.config.vocab_size, (2, num_chunks * CHUNK))
    expected = logits_and_gradients(model, tokens)
    use_chunked_mixers(model)
    for ours, theirs in zip(logits_and_gradients(model, tokens), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5)


def logits_and_gradients(model: PreTrainedModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logits.detach(), *gradients]
