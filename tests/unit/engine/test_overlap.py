"""A step launched before the tokens of the one before are known: the same answers, and the same things cached."""

import time
from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.build import BuiltEngine
from headrace.engine.sampling.sampler import Drawn
from headrace.engine.sequence import Finished, Sampled
from headrace.request import FinishReason, Sampling
from tests.support.engine.driving import (
    GREEDY,
    Run,
    assert_nothing_in_use,
    engine_of,
    generate,
    request,
    run_all,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.oracle import random_prompt
from tests.support.patience import PATIENCE_S

LENGTHS = (1, 15, 16, 17, 64, 65, 300)
RANDOM = Sampling(max_tokens=20, seed=7, temperature=0.9, top_p=0.95, ignore_eos=True)


def engines(path, **changes: object) -> tuple[BuiltEngine, BuiltEngine]:
    """With overlap and without."""
    return small_engine(path, overlap=True, **changes), small_engine(path, overlap=False, **changes)


def answers(built: BuiltEngine, samplings: list[Sampling]) -> list[list[int]]:
    runs = [
        submit(built, request(random_prompt(length), sampling))
        for length, sampling in zip(LENGTHS, samplings, strict=False)
    ]
    run_all(built)
    for run in runs:
        assert run.events[-1] == Finished(FinishReason.LENGTH)
        built.engine.release(run.sequence)
    assert_nothing_in_use(built)
    return [run.tokens for run in runs]


@pytest.mark.parametrize("family", ["granite", "qwen35_moe"])
def test_answers_of_mixed_lengths_are_the_same(family: str, tiny_checkpoint) -> None:
    early, late = engines(tiny_checkpoint(family))
    samplings = [GREEDY, RANDOM, GREEDY, RANDOM, GREEDY, replace(RANDOM, repetition_penalty=1.3), GREEDY]
    assert answers(early, samplings) == answers(late, samplings)


def test_what_is_cached_afterwards_is_the_same(tiny_checkpoint) -> None:
    contents = []
    for built in engines(tiny_checkpoint("granite"), checkpoint_policy="every"):
        for length in LENGTHS:
            generate(built, request(random_prompt(length), replace(GREEDY, max_tokens=40)))
        found = built.engine.cache.contents()
        contents.append((set(found.blocks), set(found.checkpoints)))
        assert_nothing_in_use(built)
    assert contents[0] == contents[1]


def test_a_chat_resumes_from_what_was_decoded_before(tiny_checkpoint) -> None:
    early, late = engines(tiny_checkpoint("qwen35"))
    chats = []
    for built in (early, late):
        prompt, turns = random_prompt(40), []
        for _ in range(3):
            run = generate(built, request(prompt, replace(GREEDY, max_tokens=30)))
            turns.append((run.tokens, run.sequence.num_prefilled))
            prompt = [*prompt, *run.tokens, *random_prompt(9)]
        chats.append(turns)
    assert chats[0] == chats[1]


@pytest.mark.parametrize("waited", [False, True])
def test_a_step_for_which_the_device_waited_is_not_late_by_itself(waited: bool, tiny_checkpoint, monkeypatch) -> None:
    monkeypatch.setattr("headrace.engine.sampling.sampler.Drawn.has_arrived", waited)
    built = small_engine(tiny_checkpoint("granite"), overlap=True)
    observed: list[bool] = []
    monkeypatch.setattr(built.engine.cost_fit, "observe", lambda *_, may_be_late: observed.append(may_be_late))
    generate(built, request(random_prompt(20)))
    assert not observed[0], "behind no other step: the device waited for its launch"
    assert set(observed[1:]) == {not waited}


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_that_answers_wait_for_have_the_right_of_way_but_while_the_device_computes(
    overlap: bool, tiny_checkpoint, monkeypatch
) -> None:
    built = small_engine(tiny_checkpoint("granite"), overlap=overlap)
    engine = built.engine
    launched: list[bool] = []
    waited: list[bool] = []
    launch, ids = engine._runner.launch, Drawn.ids

    def noted_launch(*args: Any) -> Any:
        launched.append(engine.right_of_way.is_free)
        return launch(*args)

    def noted_ids(drawn: Drawn) -> list[int]:
        if drawn._ids is None:
            waited.append(engine.right_of_way.is_free)
        return ids(drawn)

    monkeypatch.setattr(engine._runner, "launch", noted_launch)
    monkeypatch.setattr(Drawn, "ids", noted_ids)
    generate(built, request(random_prompt(20), replace(GREEDY, max_tokens=8)))
    assert launched == [True, *[not overlap] * 7], "nobody has an answer yet that could wait for the prompt's step"
    assert waited == [True] * 8
    assert engine.right_of_way.is_free


def test_a_stop_token_ends_the_answer_and_nothing_follows(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    free = generate(small_engine(path), request(random_prompt(20))).tokens
    sampling = replace(GREEDY, stop_token_ids=(free[3],))
    expected = free[: free.index(free[3]) + 1]
    built = small_engine(path, overlap=True)
    other = submit(built, request(random_prompt(30)))
    stopped = generate(built, request(random_prompt(20), sampling))
    assert stopped.tokens == expected
    assert [type(event) for event in stopped.events[-2:]] == [Sampled, Finished]
    assert len(other.tokens) == 16
    # The token too many was computed behind the answer: what is cached serves the same prompt as before.
    again = generate(built, request([*random_prompt(20), *expected]))
    assert again.tokens == generate(small_engine(path), request([*random_prompt(20), *expected])).tokens


def test_min_tokens_counts_those_in_flight(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    stopper = generate(small_engine(path), request(random_prompt(20))).tokens[3]
    sampling = replace(GREEDY, stop_token_ids=(stopper,), min_tokens=6)
    early, late = engines(path)
    assert generate(early, request(random_prompt(20), sampling)).tokens == (
        generate(late, request(random_prompt(20), sampling)).tokens
    )


def test_logprobs_and_scores_are_the_same(tiny_checkpoint) -> None:
    asked = request(random_prompt(30), replace(RANDOM, logprobs=3))
    early, late = (generate(built, asked, prompt_logprobs=2) for built in engines(tiny_checkpoint("qwen35")))
    assert early.events == late.events


def test_an_answer_of_one_token_is_never_decoded_on(tiny_checkpoint) -> None:
    """A prefill node hands its state over: it must stand at the prompt's end."""
    built = small_engine(tiny_checkpoint("granite"), overlap=True)
    run = submit(built, request(random_prompt(40)), max_new=1)
    run_all(built)
    assert len(run.tokens) == 1 and run.sequence.num_computed == 40
    assert built.engine.computed_tokens == 40


def test_preempted_requests_get_the_answers_they_would_have_had(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    sampling = replace(GREEDY, max_tokens=100)
    prompts = [random_prompt(n) for n in (100, 101, 102, 103)]
    expected = [generate(small_engine(path), request(prompt, sampling)).tokens for prompt in prompts]
    scarce = engine_of(path, 36, 8, overlap=True)
    runs = [submit(scarce, request(prompt, sampling)) for prompt in prompts]
    serve(scarce, *runs)
    assert scarce.engine.preemptions > 0
    assert [run.tokens for run in runs] == expected
    assert_nothing_in_use(scarce)


def test_a_cancelled_request_gets_no_token_that_was_in_flight(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("qwen35"), overlap=True)
    cancelled, other = (submit(built, request(random_prompt(n), RANDOM)) for n in (20, 30))
    step_until(built, cancelled, num_tokens=4)
    built.engine.release(cancelled.sequence)
    run_all(built)
    assert len(cancelled.tokens) == 4
    assert other.tokens == generate(small_engine(tiny_checkpoint("qwen35")), request(random_prompt(30), RANDOM)).tokens
    built.engine.release(other.sequence)
    assert_nothing_in_use(built)


def step_until(built: BuiltEngine, run: Run, num_tokens: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while len(run.tokens) < num_tokens:
        assert time.monotonic() < deadline_s
        built.engine.admit()
        built.engine.step()
