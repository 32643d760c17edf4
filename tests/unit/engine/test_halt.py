"""Halting: a decoding request leaves the steps with its state final, and goes on there or in another engine."""

from dataclasses import replace

import pytest

from headrace.cache.hits import ReceiveState
from headrace.engine.build import BuiltEngine
from headrace.engine.sequence import Finished, Halted
from headrace.request import FinishReason, Sampling
from headrace.token_array import TokenArray
from tests.support.engine.driving import GREEDY, Run, engine_of, request, run_all, small_engine, submit
from tests.support.engine.oracle import random_prompt
from tests.support.node.engine_pair import move

PROMPT = random_prompt(40, seed=5)
LONG = replace(GREEDY, max_tokens=40)
DRAWN = Sampling(
    max_tokens=40, seed=7, temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5,
    frequency_penalty=0.2, logprobs=2, min_tokens=30, ignore_eos=True,
)  # fmt: skip


def steps(built: BuiltEngine, count: int) -> None:
    for _ in range(count):
        built.engine.admit()
        built.engine.step()


def alone(path, sampling: Sampling) -> Run:
    built = small_engine(path)
    run = submit(built, request(PROMPT, sampling))
    run_all(built)
    return run


def halted(run: Run) -> Halted:
    (event,) = (event for event in run.events if isinstance(event, Halted))
    return event


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2, 9])
def test_a_halted_request_gets_no_token_until_it_goes_on(tiny_checkpoint, overlap: bool, num_steps: int) -> None:
    path = tiny_checkpoint("granite")
    built = small_engine(path, overlap=overlap)
    run, other = submit(built, request(PROMPT, LONG)), submit(built, request(PROMPT[:20], LONG))
    steps(built, num_steps)
    built.engine.halt(run.sequence)
    computed = halted(run).computed
    assert computed is not None and computed.num_tokens == len(PROMPT) + len(run.tokens) - 1
    assert run.events[-1] == halted(run), "behind its last token"
    so_far = list(run.tokens)
    run_all(built)
    assert run.tokens == so_far and other.is_finished
    built.engine.unhalt(run.sequence)
    run_all(built)
    assert run.tokens == alone(path, LONG).tokens


@pytest.mark.parametrize("family", ["granite", "qwen35"])
@pytest.mark.parametrize("sampling", [LONG, DRAWN], ids=["greedy", "drawn with penalties"])
@pytest.mark.parametrize("num_steps", [1, 8, 9, 25])
def test_another_engine_goes_on_with_the_same_tokens_and_computes_none_again(
    tiny_checkpoint, family: str, sampling: Sampling, num_steps: int
) -> None:
    path = tiny_checkpoint(family)
    here, there = small_engine(path, overlap=True), small_engine(path)
    first = submit(here, request(PROMPT, sampling))
    steps(here, num_steps)
    here.engine.halt(first.sequence)
    computed = halted(first).computed
    assert computed is not None
    *tokens, newest = first.sequence.tokens
    so_far = replace(request(PROMPT, sampling), tokens=TokenArray.of(tokens))
    left = sampling.max_tokens - (len(tokens) - len(PROMPT))
    second = submit(there, so_far, hit_policy=lambda hit: ReceiveState(), max_new=left)
    there.engine.admit()
    move(here, first, there, second)
    here.engine.release(first.sequence)
    here.engine.cache.check()
    there.engine.run_decode(second.sequence, newest)
    run_all(there)
    whole = alone(path, sampling)
    assert first.tokens + second.tokens == whole.tokens
    assert here.engine.computed_tokens + there.engine.computed_tokens == len(PROMPT) + sampling.max_tokens - 1
    assert second.events[-1] == Finished(FinishReason.LENGTH)


def test_a_halted_request_keeps_its_blocks_while_others_are_preempted(tiny_checkpoint) -> None:
    built = engine_of(tiny_checkpoint("granite"), num_blocks=11, num_slots=8)
    run = submit(built, request(PROMPT, LONG))
    steps(built, 3)
    built.engine.halt(run.sequence)
    blocks = list(run.sequence.held.block_ids)
    others = [submit(built, request(random_prompt(20, seed=i), replace(GREEDY, max_tokens=30))) for i in range(3)]
    while not all(other.is_finished for other in others):
        steps(built, 1)
        for other in others:
            if other.is_finished:
                built.engine.release(other.sequence)
    assert built.engine.preemptions
    assert run.sequence.held.block_ids == blocks


def test_what_a_preempted_request_holds_cannot_be_handed_over(tiny_checkpoint) -> None:
    built = engine_of(tiny_checkpoint("granite"), num_blocks=7, num_slots=8)
    first, second = (submit(built, request(random_prompt(30, seed=i), LONG)) for i in range(2))
    while not built.engine.preemptions:
        steps(built, 1)
    built.engine.halt(second.sequence)
    assert halted(second).computed is None
    run_all(built)
    built.engine.release(first.sequence)
    run_all(built)
    assert second.is_finished


def test_a_request_that_ends_before_it_halts_has_ended(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), overlap=True)
    run = submit(built, request(PROMPT, replace(GREEDY, max_tokens=3)))
    steps(built, 3)
    built.engine.halt(run.sequence)  # its last token is on its way
    assert run.is_finished and not any(isinstance(event, Halted) for event in run.events)
    built.engine.halt(run.sequence)
    built.engine.release(run.sequence)
    assert built.engine.cache.stats().blocks.in_use == 0


@pytest.mark.parametrize("ends", ["finish", "release"])
def test_a_halted_request_may_end(tiny_checkpoint, ends: str) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    run = submit(built, request(PROMPT, LONG))
    steps(built, 4)
    built.engine.halt(run.sequence)
    assert run.sequence in list(built.engine.sequences), "a crash of the engine is reported to it, too"
    if ends == "finish":
        built.engine.finish(run.sequence, FinishReason.STOP)
        assert run.events[-1] == Finished(FinishReason.STOP)
    built.engine.release(run.sequence)
    assert built.engine.cache.stats().blocks.in_use == 0
    assert run.sequence not in list(built.engine.sequences)
