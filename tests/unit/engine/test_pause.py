"""A paused answer: it takes part in no step, and hurts nobody."""

from dataclasses import replace

from headrace.engine.build import BuiltEngine
from tests.support.engine.driving import (
    GREEDY,
    Run,
    assert_nothing_in_use,
    engine_of,
    generate,
    request,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.oracle import random_prompt

ANSWER = replace(GREEDY, max_tokens=40)
FIRST, SECOND = random_prompt(20, 1), random_prompt(20, 2)


def steps(built: BuiltEngine, number: int) -> None:
    for _ in range(number):
        built.engine.admit()
        built.engine.step()
        built.engine.cache.check()


def paused_after(built: BuiltEngine, run: Run, num_tokens: int) -> None:
    while len(run.tokens) < num_tokens:
        steps(built, 1)
    built.engine.pause(run.sequence)


def test_a_paused_answer_stands_still_while_others_go_on_and_then_ends_as_if_nothing_had_been(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    expected = generate(small_engine(path), request(FIRST, ANSWER)).tokens
    for overlap in (False, True):
        built = small_engine(path, overlap=overlap)
        slow, other = submit(built, request(FIRST, ANSWER)), submit(built, request(SECOND, ANSWER))
        paused_after(built, slow, 5)
        steps(built, 50)
        assert len(slow.tokens) <= 6, "one may have been in flight"
        assert other.is_finished and not built.engine.has_work and slow.sequence.is_paused
        built.engine.release(other.sequence)
        built.engine.unpause(slow.sequence)
        serve(built, slow)
        assert slow.tokens == expected
        assert_nothing_in_use(built)


def test_a_paused_answer_is_preempted_before_a_newer_one_and_lets_others_pass(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    expected = generate(small_engine(path), request(FIRST, ANSWER)).tokens
    built = engine_of(path, num_blocks=6, num_slots=8)
    slow, other = submit(built, request(FIRST, ANSWER)), submit(built, request(SECOND, ANSWER))
    paused_after(built, slow, 5)
    while not other.is_finished:
        steps(built, 1)
    assert (slow.sequence.num_preemptions, other.sequence.num_preemptions) == (1, 0)
    built.engine.release(other.sequence)
    steps(built, 5)
    assert slow.sequence.claim is None, "it holds nothing that others could use"
    third = submit(built, request(SECOND, ANSWER))
    serve(built, third)
    built.engine.unpause(slow.sequence)
    serve(built, slow)
    assert slow.tokens == expected
    assert_nothing_in_use(built)


def test_a_request_that_waits_for_a_paused_answers_blocks_gets_them_without_another_command(tiny_checkpoint) -> None:
    built = engine_of(tiny_checkpoint("granite"), num_blocks=4, num_slots=8, overlap=True)
    slow = submit(built, request(FIRST, ANSWER))
    paused_after(built, slow, 5)
    waiting = submit(built, request(SECOND, ANSWER))
    while built.engine.has_work:  # else the engine's thread sleeps
        steps(built, 1)
    assert waiting.is_finished


def test_a_paused_answer_can_be_cancelled_and_finished(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    built = small_engine(path)
    runs = [submit(built, request(prompt, ANSWER)) for prompt in (FIRST, SECOND)]
    for run in runs:
        paused_after(built, run, 3)
    built.engine.finish(runs[0].sequence, "stop")
    assert runs[0].is_finished
    for run in runs:
        built.engine.release(run.sequence)
    assert_nothing_in_use(built)
