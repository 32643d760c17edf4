"""The oracle: transformers in float32 on a CPU, with which every path through Headrace must agree token for token."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

MIN_MARGIN = 1.5e-4
"""Between two logits. On the random checkpoints the engine's lie within 7e-5 of transformers' (Qwen; Granite 7e-6) at
4,558 positions of prompts up to 1,500 tokens: two that are further apart than twice that are never swapped.
"""


class NearTie(AssertionError):
    """Float32 noise decides: another order of summing, a batch's for one, swaps the two best tokens."""


@lru_cache(maxsize=4)
def oracle(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(path: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The answer of transformers' `generate`, end-of-sequence ignored.

    Raises `NearTie` where a test that demands equal tokens would fail now and then: see `clear_prompt`.
    """
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
        output_logits=True,
        return_dict_in_generate=True,
    )
    best, second = torch.cat(generated.logits).topk(2).values.unbind(-1)
    margin, position = (best - second).min(0)
    if margin < MIN_MARGIN:
        raise NearTie(f"two tokens are {margin:.1e} apart at {position} of the answer: take another prompt")
    return tuple(generated.sequences[0, len(prompt) :].tolist())


def greedy_along(path: Path, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The token that transformers prefers after the prompt and each beginning of the answer: equal to the answer only
    if `generate` would give that, but in one pass, a twentieth of its time. The first difference is the wrong token.

    Where two tokens are closer than MIN_MARGIN, so that `greedy` raises, either of them is right.
    """
    return list(_greedy_along(path, tuple(prompt), tuple(answer)))


@lru_cache(maxsize=1000)
@torch.inference_mode()
def _greedy_along(path: Path, prompt: tuple[int, ...], answer: tuple[int, ...]) -> tuple[int, ...]:
    tokens = torch.tensor([[*prompt, *answer[:-1]]])
    logits_TV = oracle(path)(tokens, use_cache=False, logits_to_keep=len(answer)).logits[0]
    answered_T = torch.tensor(answer)
    best_T, preferred_T = logits_TV.max(-1)
    is_right_T = best_T - logits_TV.gather(-1, answered_T[:, None])[:, 0] < MIN_MARGIN
    return tuple(torch.where(is_right_T, answered_T, preferred_T).tolist())


def random_prompt(length: int, seed: int = 0, *, vocab_size: int = 512) -> list[int]:
    """Token ids without the special ones; another prompt for each length and seed."""
    generator = torch.Generator().manual_seed(1_000 * length + seed)
    return torch.randint(5, vocab_size, (length,), generator=generator).tolist()


def clear_prompt(path: Path, length: int, num_tokens: int, seed: int = 0, *, after: Sequence[int] = ()) -> list[int]:
    """The first random prompt, from this seed on in steps of 100, whose greedy answer does not depend on noise.

    after   turns of a chat before it: they and what is new are the prompt
    """
    while True:
        prompt = [*after, *random_prompt(length, seed)]
        try:
            greedy(path, prompt, num_tokens)
        except NearTie:
            seed += 100
        else:
            return prompt
