"""transformers in float32 on a CPU: what every path through Headrace must agree with, token for token."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@lru_cache(maxsize=4)
def oracle(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(path: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers' `generate` answers, end-of-sequence ignored."""
    return list(_greedy(path, tuple(prompt), num_tokens))


@lru_cache(maxsize=1000)
def _greedy(path: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    generated = oracle(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(generated[0, len(prompt) :].tolist())


def random_prompt(length: int, seed: int = 0, *, vocab_size: int = 512) -> list[int]:
    """Token ids without the special ones; another prompt for each length and seed."""
    generator = torch.Generator().manual_seed(1_000 * length + seed)
    return torch.randint(5, vocab_size, (length,), generator=generator).tolist()
