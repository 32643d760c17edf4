"""Engines whose model keeps tails: rows are short, states are written late, and a step in between finds no memory."""

from dataclasses import replace

import pytest
import torch

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
            built.engine.unhalt(run.sequence)
            num_halts += 1
    assert run.tokens == expected and num_halts > 8
    built.engine.release(run.sequence)
    assert_nothing_in_use(built)


def test_those_keep_their_tails_whose_turn_comes_next(tiny_checkpoint) -> None:
    """Five rows for twelve sequences, of which a step takes four: one of them had its row kept, and three write."""
    built, num_written = small_engine(tiny_checkpoint("granite"), max_running=4), 0
    write_states = built.engine._runner.write_states

    def count(states) -> None:
        nonlocal num_written
        num_written += len(states)
        write_states(states)

    built.engine._runner.write_states = count
    runs = [submit(built, request(random_prompt(10, n), ANSWER)) for n in range(12)]
    serve(built, *runs)
    assert 0 < num_written <= 3 / 4 * sum(len(run.tokens) for run in runs)


def test_paused_sequences_give_their_rows_first(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    asked = [request(random_prompt(10 + n, n), ANSWER) for n in range(4)]
    expected = [generate(small_engine(path), each).tokens for each in asked]
    built = small_engine(path, max_running=3)
    runs = [submit(built, each) for each in asked[:3]]
    for _ in range(5):
        built.engine.admit()
        built.engine.step()
    built.engine.pause(runs[0].sequence)
    runs.append(submit(built, asked[3]))
    for _ in range(5):
        built.engine.admit()
        built.engine.step()
    assert [run.sequence.tail is None for run in runs] == [True, False, False, False]
    built.engine.unpause(runs[0].sequence)
    serve(built, *runs)
    assert [run.tokens for run in runs] == expected
    assert_nothing_in_use(built)


def test_a_halt_that_finds_no_memory_leaves_the_sequence_as_it_was(tiny_checkpoint) -> None:
    path, prompt = tiny_checkpoint("granite"), random_prompt(13)
    expected = generate(small_engine(path), request(prompt, ANSWER)).tokens
    built = small_engine(path)
    run = submit(built, request(prompt, ANSWER))
    for _ in range(6):
        built.engine.admit()
        built.engine.step()
    write_states = built.engine._runner.write_states

    def fail(states) -> None:
        raise torch.OutOfMemoryError("no memory for the numbers of states")

    built.engine._runner.write_states = fail
    with pytest.raises(torch.OutOfMemoryError):
        built.engine.halt(run.sequence)
    built.engine._runner.write_states = write_states
    serve(built, run)
    assert run.tokens == expected
    assert_nothing_in_use(built)


def test_a_request_that_is_given_up_gives_its_row_up(tiny_checkpoint) -> None:
    """Before it is released: the next in turn takes it, and three rows serve three sequences at once."""
    built = small_engine(tiny_checkpoint("granite"), max_running=3)
    runs = [submit(built, request(random_prompt(10 + n, n), ANSWER)) for n in range(4)]
    while not all(len(run.tokens) > 1 for run in runs):
        built.engine.admit()
        built.engine.step()
    failures = iter([True])
    fail_launches(built, lambda inputs: next(failures, False))
    built.engine.step()
    given_up = [run for run in runs if isinstance(run.events[-1], Failed)]
    serve(built, *(run for run in runs if run not in given_up))
    assert len(given_up) == 1 and num_free_rows(built) == 3
    built.engine.release(given_up[0].sequence)
    assert num_free_rows(built) == 3
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
