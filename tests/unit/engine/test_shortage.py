"""A step for which the device has too little memory costs one request, not the node."""

from dataclasses import replace

import pytest

from headrace.engine.failures import NeedsMoreMemory, OutOfMemory
from headrace.engine.sequence import Failed
from headrace.token_array import TokenArray
from tests.support.engine.driving import (
    GREEDY,
    Run,
    assert_nothing_in_use,
    fail_launches,
    generate,
    request,
    run_all,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.oracle import random_prompt

ANSWER = replace(GREEDY, max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5)
FIRST, SECOND, LONG = random_prompt(40, 1), random_prompt(50, 2), random_prompt(600, 3)


def failure(run: Run) -> Exception:
    (failed,) = [event for event in run.events if isinstance(event, Failed)]
    return failed.error


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after_writing", [False, True])
@pytest.mark.parametrize("family", ["granite", "qwen35"])
def test_the_newest_prompt_is_refused_and_the_answers_beside_it_are_the_same(
    family, after_writing, overlap, tiny_checkpoint
) -> None:
    path = tiny_checkpoint(family)
    expected = [generate(small_engine(path), request(prompt, ANSWER)).tokens for prompt in (FIRST, SECOND)]
    built = small_engine(path, overlap=overlap)
    fail_launches(built, lambda inputs: any(len(i.tokens) > 150 for i in inputs), after_writing=after_writing)
    runs = [submit(built, request(prompt, ANSWER)) for prompt in (FIRST, SECOND)]
    while min(len(run.tokens) for run in runs) < 5:
        built.engine.admit()
        built.engine.step()
    poison = submit(built, request(LONG, ANSWER))
    serve(built, *runs)
    error = failure(poison)
    assert isinstance(error, NeedsMoreMemory)
    assert "Tried to allocate 8.14 GiB; shorten the prompt, or lower" in str(error)
    assert [run.tokens for run in runs] == expected
    assert built.engine.shortages == 1
    built.engine.release(poison.sequence)
    assert_nothing_in_use(built)


def test_a_prompt_that_is_scored_is_refused_before_a_newer_one(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), max_step_tokens=1024)
    fail_launches(built, lambda inputs: sum(i.num_logits for i in inputs) > 256)
    scored = submit(built, request(LONG, ANSWER), prompt_logprobs=1)
    plain = submit(built, request(FIRST, ANSWER))
    serve(built, plain)
    assert isinstance(failure(scored), NeedsMoreMemory)
    assert len(plain.tokens) == 24


def test_blocks_that_are_being_sent_are_not_computed_again_into_others(tiny_checkpoint) -> None:
    """Another node computes the request, which is not refused: it was not the newest prompt of the step."""
    built = small_engine(tiny_checkpoint("granite"), max_step_tokens=256)
    fail_launches(built, lambda inputs: any(i.start for i in inputs))
    sent = submit(built, request(LONG, replace(GREEDY, max_tokens=1), age_s=5.0), is_sent=True)
    built.engine.admit()
    built.engine.step()
    newer = submit(built, request(FIRST, replace(GREEDY, max_tokens=1)))
    run_all(built)
    assert isinstance(failure(newer), NeedsMoreMemory)
    assert isinstance(failure(sent), OutOfMemory)
    assert not built.engine._waiting
    for run in (sent, newer):
        built.engine.release(run.sequence)
    assert_nothing_in_use(built)


def test_an_answer_that_began_on_another_node_is_not_refused(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    fail_launches(built, lambda inputs: any(len(i.tokens) > 150 for i in inputs))
    migrated = submit(built, replace(request(LONG[:590], ANSWER), tokens=TokenArray.of(LONG)))
    run_all(built)
    assert isinstance(failure(migrated), OutOfMemory)


def test_answers_alone_that_find_too_little_memory_go_to_another_node_one_by_one(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    runs = [submit(built, request(prompt, ANSWER)) for prompt in (FIRST, SECOND)]
    fail_launches(built, lambda inputs: len(inputs) == 2 and all(len(i.tokens) == 1 for i in inputs))
    serve(built, runs[0])
    assert isinstance(failure(runs[1]), OutOfMemory)
    assert len(runs[0].tokens) == 24
    built.engine.release(runs[1].sequence)
    assert_nothing_in_use(built)
