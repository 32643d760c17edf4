"""Memory that nobody has written is NaN here: no answer may depend on it, whatever the order of requests."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.engine.build import BuiltEngine
from headrace.request import Request
from tests.support.engine.drafters import ANSWER, KNOWN, MTP_DRAFTS, ROOMY
from tests.support.engine.driving import GREEDY, request, run_all, small_engine, submit
from tests.support.engine.oracle import random_prompt
from tests.support.engine.tiny_checkpoints import FAMILIES, build_model, kimi_linear_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def unwritten(built: BuiltEngine) -> Iterator[Tensor]:
    memory = built.engine._runner.memory
    yield from memory.pools
    for tail in memory.tails:
        yield from tail.parts


def answers(built: BuiltEngine, rounds: list[list[Request]]) -> list[list[int]]:
    """All answers; each round's requests run together, those of a later one may hit what is cached of earlier ones."""
    found = []
    for asked in rounds:
        runs = [submit(built, each) for each in asked]
        run_all(built)
        for run in runs:
            built.engine.release(run.sequence)
        found += [run.tokens for run in runs]
    return found


def fill(built: BuiltEngine, value: float) -> None:
    with torch.inference_mode():
        for part in unwritten(built):
            part.fill_(value) if part.is_floating_point() else part.fill_(255 * math.isnan(value))


def chats(seed: int) -> list[list[Request]]:
    """Prompts of all lengths beside each other, and what goes on where they end."""
    prompts = [random_prompt(length, seed) for length in (1, 15, 16, 17, 40, 100)]
    further = [[*prompt, *random_prompt(9, seed + 1)] for prompt in prompts]
    sampling = replace(GREEDY, max_tokens=20)
    return [[request(prompt, sampling) for prompt in each] for each in (prompts, further, prompts)]


@pytest.fixture
def checkpoint(family: str, tiny_checkpoint, tmp_path: Path) -> Path:
    if family != "kimi_linear":
        return tiny_checkpoint(family)
    build_model(kimi_linear_config(kv_lora_rank=64, qk_rope_head_dim=16)).save_pretrained(tmp_path)  # fits a GPU, too
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_do_not_depend_on_it(checkpoint: Path) -> None:
    found = []
    for value in (0.0, math.nan):
        built = small_engine(checkpoint, device=DEVICE, dtype="float32", cache_bytes=ROOMY)
        fill(built, value)
        found.append(answers(built, chats(seed=1)))
        assert built.engine.cache.stats().totals.reused_tokens > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_with_drafts_do_not_depend_on_it(overlap: bool, trained: Path) -> None:
    """The layer's are right for KNOWN, and mostly wrong else."""
    rounds = [[request(KNOWN, ANSWER), *asked] for asked in chats(seed=2)]
    plain = answers(small_engine(trained, device=DEVICE, dtype="float32"), rounds)
    built = small_engine(
        trained, device=DEVICE, dtype="float32", overlap=overlap, speculation=MTP_DRAFTS, cache_bytes=ROOMY
    )
    fill(built, math.nan)
    assert answers(built, rounds) == plain
    assert built.engine.drafting is not None and built.engine.drafting.accepted_tokens > 0
