"""Checkpoints in fewer bytes: the shipped models recall what they recall with exact ones.

Each question's text comes in turns of TURN_TOKENS, as a chat's does, and each turn resumes from a checkpoint of the one
before: by the time of the question a state has been packed and unpacked several times. `pytest -s` shows the figures.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.engine.driving import GREEDY, request, serve, small_engine, submit
from tiny_models.recall import held_out_questions, is_right

MODELS = Path(__file__).parents[3] / "tiny_models"
NUM_QUESTIONS = 20  # docs/cache-policy.md has the figures of 200
TURN_TOKENS = 48
TOGETHER = 20

pytestmark = pytest.mark.slow


def answers(model: Path, prompts: list[list[int]], checkpoint_dtype: str | None) -> tuple[list[list[int]], int]:
    """The answers, and how many checkpoints were resumed from."""
    built = small_engine(model, checkpoint_dtype=checkpoint_dtype, cache_bytes=256 << 20, max_running=TOGETHER)
    given = []
    for first in range(0, len(prompts), TOGETHER):
        some = prompts[first : first + TOGETHER]
        for end in range(TURN_TOKENS, max(map(len, some)), TURN_TOKENS):
            turn = [request(prompt[:end], replace(GREEDY, max_tokens=1)) for prompt in some if end < len(prompt)]
            serve(built, *(submit(built, each) for each in turn))
        runs = [submit(built, request(prompt, replace(GREEDY, max_tokens=24))) for prompt in some]
        serve(built, *runs)
        given += [run.tokens for run in runs]
    return given, built.engine.cache.stats().totals.checkpoints_used


@pytest.mark.parametrize("name", ["headrace-tiny-granite-h", "headrace-tiny-qwen3.5"])
def test_top_1_agreement_and_recall(name: str) -> None:
    model = MODELS / name
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    questions = held_out_questions(NUM_QUESTIONS, seed=7, encode=lambda text: tokenizer.encode(text).ids)
    prompts = [tokenizer.encode(question.prompt_text).ids for question in questions]

    def num_right(given: list[list[int]]) -> int:
        texts = (tokenizer.decode(answer).split("\n")[0].strip() for answer in given)
        return sum(is_right(question, text) for question, text in zip(questions, texts, strict=True))

    exact, num_used = answers(model, prompts, None)
    assert num_used > 2 * NUM_QUESTIONS
    for checkpoint_dtype in ("float16", "int8", "fp8"):
        packed, num_used = answers(model, prompts, checkpoint_dtype)
        assert num_used > 2 * NUM_QUESTIONS
        pairs = [(one, other) for both in zip(exact, packed, strict=True) for one, other in zip(*both, strict=True)]
        agreement = sum(one == other for one, other in pairs) / len(pairs)
        figures = f"{agreement:.4f} of {len(pairs)} tokens alike, {num_right(packed)} right, exact {num_right(exact)}"
        print(f"{name}: {checkpoint_dtype} checkpoints: {figures}")
        assert agreement >= 0.99
        assert abs(num_right(packed) - num_right(exact)) <= 1
