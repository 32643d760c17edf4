"""The shipped models in bfloat16 against themselves in float32, on questions whose answers stand in the prompt.

On a CUDA device, states in either dtype, and float32 there against float32 on a CPU; on a CPU a few questions, so
that what the figures are made of is tested everywhere. `pytest -s` shows the figures.
"""

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from headrace.engine.runner import ModelRunner
from headrace.engine.sampling.draw import Draw
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.weights import load_model
from headrace.request import Sampling
from tiny_models.recall import RecallQuestion, held_out_questions, is_right

MODELS = Path(__file__).parents[3] / "tiny_models"
NAMES = ("headrace-tiny-granite-h", "headrace-tiny-qwen3.5")
HAS_CUDA = torch.cuda.is_available()
NUM_QUESTIONS = 200 if HAS_CUDA else 24
TOGETHER = 8
BLOCKS = 64  # a sequence
ANSWER_TOKENS = 24
LEAST_AGREEMENT = 0.99
MOST_TIPPED = 0.01
GREEDY = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), 0)

CUDA = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device here")
PLACES = [
    pytest.param("cpu", "float32", marks=pytest.mark.skipif(HAS_CUDA, reason="200 questions, which CUDA answers")),
    pytest.param("cuda", "float32", marks=CUDA),
    pytest.param("cuda", "bfloat16", marks=CUDA),
]


def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))


@lru_cache
def questions(name: str) -> list[RecallQuestion]:
    encode = tokenizer(name).encode
    return held_out_questions(NUM_QUESTIONS, encode=lambda text: encode(text).ids)


def is_answered(name: str, question: RecallQuestion, answer: list[int]) -> bool:
    return is_right(question, tokenizer(name).decode(answer).split("\n")[0])


@lru_cache
def in_float32(name: str) -> list[list[int]]:
    """The answers of the CPU."""
    return answers(runner(name, "cpu", "float32", "float32"), name)


def runner(name: str, device: str, dtype: str, state_dtype: str, quantization: str | None = None) -> ModelRunner:
    """Sequence i stands in slot i and in BLOCKS blocks; on a GPU decodes are replays."""
    model = load_model(MODELS / name, getattr(torch, dtype), device, quantization=quantization)
    memory = CacheMemory(model.cache_layout(16, state_dtype), TOGETHER * BLOCKS, TOGETHER, device)
    made = ModelRunner(model, memory)
    if device == "cuda":
        made.capture_decodes(TOGETHER, 16 * BLOCKS)
    return made


def answers(runner: ModelRunner, name: str, forced: list[list[int]] | None = None) -> list[list[int]]:
    """The best token after each prompt and each answer token, ANSWER_TOKENS a question.

    forced   what stands in the answer, whatever the model would have said; None: what it says
    """
    encode = tokenizer(name).encode
    prompts = [encode(question.prompt_text).ids for question in questions(name)]
    said = []
    for first in range(0, len(prompts), TOGETHER):
        some = slice(first, first + TOGETHER)
        said += _answer_together(runner, prompts[some], None if forced is None else forced[some])
    return said


def _answer_together(runner: ModelRunner, prompts: list[list[int]], forced: list[list[int]] | None) -> list[list[int]]:
    blocks = [range(i * BLOCKS, (i + 1) * BLOCKS) for i in range(len(prompts))]
    draws = [(row, GREEDY) for row in range(len(prompts))]
    steps = [SequenceInput(prompt, 0, blocks[i], None, i) for i, prompt in enumerate(prompts)]
    said: list[list[int]] = [[] for _ in prompts]
    for n in range(ANSWER_TOKENS):
        for i, token in enumerate(runner.launch(steps, draws).drawn.tokens()):
            said[i].append(token.id)
        given = said if forced is None else forced
        steps = [SequenceInput((given[i][n],), len(prompt) + n, blocks[i], i, i) for i, prompt in enumerate(prompts)]
    return said


def up_to_line_end(name: str, answer: list[int]) -> int:
    """How many tokens the answer has: what follows its line is nobody's answer."""
    ends = [n for n, token in enumerate(answer, 1) if "\n" in tokenizer(name).decode([token])]
    return ends[0] if ends else len(answer)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("device", "state_dtype"), PLACES)
def test_bfloat16_prefers_the_tokens_of_float32(name: str, device: str, state_dtype: str) -> None:
    """Token by token, each behind what float32 answered."""
    expected = in_float32(name)
    said = answers(runner(name, device, "bfloat16", state_dtype), name, forced=expected)
    lengths = [up_to_line_end(name, answer) for answer in expected]
    agree = sum(
        ours == theirs
        for answer, other, length in zip(said, expected, lengths, strict=True)
        for ours, theirs in zip(answer[:length], other[:length], strict=True)
    )
    print(f"{name}, {device}, states in {state_dtype}: bfloat16 agrees on {agree} of {sum(lengths)} tokens")
    assert agree >= LEAST_AGREEMENT * sum(lengths)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("device", "state_dtype"), PLACES)
def test_recall_in_bfloat16_is_that_of_float32(name: str, device: str, state_dtype: str) -> None:
    """But for questions that stand on the edge, which rounding tips to either side: at most one in a hundred."""
    said = answers(runner(name, device, "bfloat16", state_dtype), name)
    right = [is_answered(name, q, answer) for q, answer in zip(questions(name), said, strict=True)]
    expected = [is_answered(name, q, answer) for q, answer in zip(questions(name), in_float32(name), strict=True)]
    lost = [i for i, (ours, theirs) in enumerate(zip(right, expected, strict=True)) if theirs and not ours]
    gained = [i for i, (ours, theirs) in enumerate(zip(right, expected, strict=True)) if ours and not theirs]
    print(
        f"{name}, {device}, states in {state_dtype}: {sum(right)} right, {sum(expected)} in float32, "
        f"of {len(right)}; lost {lost}, gained {gained}"
    )
    assert sum(expected) >= 0.9 * len(expected)
    assert len(lost) + len(gained) <= MOST_TIPPED * len(right)


@CUDA
@pytest.mark.parametrize("name", NAMES)
def test_recall_in_fp8_is_that_of_bfloat16(name: str) -> None:
    """With matrices quantised at load, within one question of 200."""
    said, plain = (answers(runner(name, "cuda", "bfloat16", "float32", form), name) for form in ("fp8", None))
    right, expected = (
        sum(is_answered(name, question, answer) for question, answer in zip(questions(name), each, strict=True))
        for each in (said, plain)
    )
    print(f"{name}: {right} of {len(said)} right in FP8, {expected} in bfloat16")
    assert abs(right - expected) <= 1


@CUDA
@pytest.mark.parametrize("name", NAMES)
def test_float32_answers_on_cuda_are_those_of_the_cpu(name: str) -> None:
    said = answers(runner(name, "cuda", "float32", "float32"), name)
    assert said == in_float32(name)
