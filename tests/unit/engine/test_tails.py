"""Engines whose model keeps tails: rows are short, states are written late, and a step in between finds no memory."""

from dataclasses import replace

import pytest

from headrace.engine.build import BuiltEngine
from headrace.engine.sequence import Failed, Halted
from tests.support.engine.driving import (
    GREEDY,
    assert_nothing_in_use,
    fail_launches,
    generate,
    request,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.oracle import random_prompt

ANSWER = replace(GREEDY, max_tokens=40)
FAMILIES = ["granite", "qwen35"]


def num_free_rows(built: BuiltEngine) -> int:
    assert built.engine._tail_rows is not None
    return built.engine._tail_rows.num_free


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_more_sequences_than_rows_take_turns(family: str, overlap: bool, tiny_checkpoint) -> None:
    """Three rows for seven sequences, of which a step takes two: those that wait get their states written."""
    path = tiny_checkpoint(family)
    asked = [request(random_prompt(10 + 3 * n, n), ANSWER) for n in range(7)]
    expected = [generate(small_engine(path), each).tokens for each in asked]
    built = small_engine(path, max_running=2, overlap=overlap)
    assert num_free_rows(built) == 3
    runs = [submit(built, each) for each in asked]
    serve(built, *runs)
    assert [run.tokens for run in runs] == expected
    assert num_free_rows(built) == 3
    assert_nothing_in_use(built)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_halted_sequence_has_its_newest_state_in_its_slot(family: str, overlap: bool, tiny_checkpoint) -> None:
    """It goes on from there, at whatever place of a block it was halted, and as often as it is."""
    path, prompt = tiny_checkpoint(family), random_prompt(13)
    expected = generate(small_engine(path), request(prompt, ANSWER)).tokens
    built = small_engine(path, overlap=overlap)
    run = submit(built, request(prompt, ANSWER))
    num_halts = 0
    while not run.is_finished:
        for _ in range(3):
            built.engine.admit()
            built.engine.step()
        built.engine.halt(run.sequence)
        if isinstance(run.events[-1], Halted) and run.events[-1].computed is not None:
            assert run.sequence.tail is None and num_free_rows(built) == built.memory.num_tail_rows
            built.engine.go_on_halted(run.sequence)
            num_halts += 1
    assert run.tokens == expected and num_halts > 8
    built.engine.release(run.sequence)
    assert_nothing_in_use(built)


@pytest.mark.parametrize("policy", ["none", "every"])
@pytest.mark.parametrize("num_steps", range(1, 19))
def test_a_step_that_finds_no_memory_costs_others_nothing_between_written_states(
    num_steps: int, policy: str, tiny_checkpoint
) -> None:
    """Only where a state is written in place, once in a block, may some layers have advanced: it is computed again."""
    path = tiny_checkpoint("granite")
    asked = [request(random_prompt(16, n), ANSWER) for n in range(2)]
    expected = [generate(small_engine(path), each).tokens for each in asked]
    built = small_engine(path, checkpoint_policy=policy)
    runs = [submit(built, each) for each in asked]
    for _ in range(num_steps):
        built.engine.admit()
        built.engine.step()
    position = runs[0].sequence.num_computed
    failures = iter([True])
    fail_launches(built, lambda inputs: next(failures, False))
    built.engine.step()
    serve(built, runs[0])
    is_in_place = position % 16 == 15 and policy == "none"
    assert built.engine.preemptions == int(is_in_place)
    assert runs[0].tokens == expected[0]
    assert isinstance(runs[1].events[-1], Failed)
