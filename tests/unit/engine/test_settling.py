"""Reports of tokens that drafts follow: behind the next launch, and none is lost or comes out of order."""

from dataclasses import replace

import pytest
import torch

from headrace.engine.build import BuiltEngine
from headrace.engine.sequence import Failed, Finished, Halted, Sampled
from headrace.request import FinishReason
from tests.support.engine.drafters import always_right, drafting_engine, steps, text
from tests.support.engine.driving import GREEDY, Run, generate, request, serve, small_engine, submit
from tests.support.engine.oracle import random_prompt

PROMPT = 20
ASKED = request(random_prompt(PROMPT), replace(GREEDY, max_tokens=24))


@pytest.fixture
def known(tiny_checkpoint) -> list[int]:
    return text(ASKED, generate(small_engine(tiny_checkpoint("granite")), ASKED))


@pytest.fixture
def built(tiny_checkpoint, known) -> BuiltEngine:
    return drafting_engine(tiny_checkpoint("granite"), always_right(known), overlap=True)


def raise_at_next_launch(built: BuiltEngine, error: BaseException) -> None:
    def launch(*_: object) -> None:
        raise error

    built.engine._runner.launch = launch


def drafting(built: BuiltEngine) -> Run:
    """A request with drafts in flight."""
    run = submit(built, ASKED)
    steps(built, 3)
    assert run.sequence.drafts
    return run


def test_tokens_are_reported_though_the_next_launch_raises(built, known) -> None:
    run = drafting(built)
    num_reported = len(run.tokens)
    raise_at_next_launch(built, RuntimeError("the device is lost"))
    with pytest.raises(RuntimeError, match="the device is lost"):
        steps(built, 1)
    assert run.tokens == list(run.sequence.tokens[PROMPT:]) == known[PROMPT : PROMPT + num_reported + 4]


def test_tokens_are_reported_before_the_shortage_that_ends_their_request(built, known) -> None:
    run = drafting(built)
    num_reported = len(run.tokens)
    raise_at_next_launch(built, torch.OutOfMemoryError("CUDA out of memory"))
    steps(built, 1)
    assert run.tokens == known[PROMPT : PROMPT + num_reported + 4]
    assert isinstance(run.events[-1], Failed)
    built.engine.release(run.sequence)


def test_a_halted_request_has_had_all_its_tokens(built, known) -> None:
    run = drafting(built)
    built.engine.halt(run.sequence)
    assert isinstance(run.events[-1], Halted)
    assert run.tokens == list(run.sequence.tokens[PROMPT:])
    built.engine.unhalt(run.sequence)
    serve(built, run)
    assert run.tokens == known[PROMPT:]


def test_the_last_token_ends_the_answer_and_nothing_follows(built, known) -> None:
    run = submit(built, ASKED)
    serve(built, run)
    sampled = [event for event in run.events if isinstance(event, Sampled)]
    assert [event.finish for event in sampled] == [None] * 23 + [FinishReason.LENGTH]
    assert run.events[-2:] == [sampled[-1], Finished(FinishReason.LENGTH)]


def test_a_request_that_is_released_at_a_token_gets_no_other(built) -> None:
    run, tokens = submit(built, ASKED), []

    def release_at_third(event: object) -> None:
        if isinstance(event, Sampled):
            tokens.append(event.token.id)
            if len(tokens) == 3:
                built.engine.release(run.sequence)

    run.sequence.job = replace(run.sequence.job, on_event=release_at_third)
    steps(built, 8)
    assert len(tokens) == 3
    assert not built.engine.has_work
