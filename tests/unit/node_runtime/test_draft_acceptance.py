"""Drafts of the shipped MTP layer are right as often computed, handed over, resumed, fetched or moved."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from decode_node.config import LocalPrefillConfig
from headrace.engine.build import build_engine
from headrace.request import Request
from headrace.speculation.config import SpeculationConfig
from headrace.wire.messages import DecodeDone, DecodeReport, Start
from tests.support.engine.drafters import num_drafted
from tests.support.engine.driving import GREEDY, SMALL, generate, request
from tests.support.node.engine_pair import answer_with_a_move
from tests.support.node.linked_roles import TIMEOUT_S, Answer, Linked, linked
from tiny_models.recall import held_out_questions, raw_question

MODEL = Path(__file__).parents[3] / "tiny_models" / "headrace-tiny-qwen3.5"
NUM_QUESTIONS = 16
ENGINE = replace(SMALL, cache_bytes=256 << 20, speculation=SpeculationConfig("mtp", "fixed", 3))
ANSWER = replace(GREEDY, max_tokens=40)

pytestmark = pytest.mark.slow


async def no_commands() -> AsyncIterator[None]:
    return
    yield


async def computed(nodes: Linked, asked: Request) -> tuple[list[int], DecodeReport]:
    """Answered by the decode node alone."""
    tokens: list[int] = []
    async for event in nodes.decode.run(Start(asked, may_prefill_remotely=False), no_commands(), TIMEOUT_S):
        if isinstance(event, DecodeDone):
            return tokens, event.report
        tokens += [token.id for token in getattr(event, "tokens", ())]
    raise AssertionError("no report came")


def acceptance(reports: list[DecodeReport]) -> float:
    drafted, accepted = (sum(getattr(each, name) for each in reports) for name in ("drafted_tokens", "accepted_tokens"))
    print(f"{accepted} of {drafted} drafts right")
    return accepted / drafted


def report(answer: Answer) -> DecodeReport:
    assert answer.decode is not None
    return answer.decode


async def test_acceptance_is_the_same_on_every_way():
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    questions = held_out_questions(NUM_QUESTIONS, seed=7, encode=lambda text: tokenizer.encode(text).ids)
    prompts = [tokenizer.encode(question.prompt_text).ids for question in questions]
    settings = {"prefill": {"engine": ENGINE}, "decode": {"engine": ENGINE, "local_prefill": LocalPrefillConfig(0)}}
    async with linked(MODEL, **settings) as alone:
        local = [await computed(alone, request(prompt, ANSWER)) for prompt in prompts]
        turns = []
        for question, prompt, (answer, _) in zip(questions, prompts, local, strict=True):
            again = tokenizer.encode(raw_question(question.question)).ids
            turns.append([*prompt, *answer, *again])
        await alone.settled()
    async with linked(MODEL, **settings) as alone:
        second = [(await computed(alone, request(turn, ANSWER)))[1] for turn in turns]
        await alone.settled()
    expected, expected_second = acceptance([each for _, each in local]), acceptance(second)
    assert expected > 0.5
    handed_over, resumed, fetched = [], [], []
    async with linked(MODEL, **settings) as nodes:
        for prompt, turn in zip(prompts, turns, strict=True):
            handed_over.append(report(await nodes.answer(request(prompt, ANSWER))))
            resumed.append((await computed(nodes, request(turn, ANSWER)))[1])
        await nodes.settled()
    assert {each.state for each in handed_over} == {"received"} and {each.state for each in resumed} == {"resumed"}
    async with linked(MODEL, **settings) as nodes:
        for prompt, turn in zip(prompts, turns, strict=True):
            _, first = await computed(nodes, request(prompt, ANSWER))
            answer = await nodes.answer(request(turn, ANSWER), fetch_source_tokens=max(first.checkpoints))
            assert answer.prefill is not None and answer.prefill.fetched_tokens == max(first.checkpoints)
            fetched.append(report(answer))
        await nodes.settled()
    assert abs(acceptance(handed_over) - expected) <= 0.01
    assert abs(acceptance(resumed) - expected_second) <= 0.01
    assert abs(acceptance(fetched) - expected_second) <= 0.01


@pytest.mark.parametrize("num_steps", [2, 5, 9])
def test_acceptance_is_the_same_after_a_migration(num_steps: int) -> None:
    """All answers move in the middle, after so many steps; drafts of both engines count."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    questions = held_out_questions(NUM_QUESTIONS, seed=7, encode=lambda text: tokenizer.encode(text).ids)
    prompts = [tokenizer.encode(question.prompt_text).ids for question in questions]
    alone, here, there = (build_engine(str(MODEL), ENGINE, time.monotonic) for _ in range(3))
    for prompt in prompts:
        answer = generate(alone, request(prompt, ANSWER)).tokens
        assert answer_with_a_move(here, there, request(prompt, ANSWER), num_steps) == answer
    local = num_drafted(alone)
    before, after = num_drafted(here), num_drafted(there)
    print(f"\nof (drafted, accepted) alone {local}, before the move {before}, behind it {after}")
    assert before[0] > 0 and after[0] > 0
    drafted, accepted = before[0] + after[0], before[1] + after[1]
    assert abs(accepted / drafted - local[1] / local[0]) <= 0.01
