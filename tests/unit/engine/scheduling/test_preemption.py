"""Preemption when requests outgrow the blocks: which request is preempted, and that no answer changes (scenario 19)."""

import time
from dataclasses import replace

import pytest

from headrace.cache.hits import ReceiveState
from headrace.engine.build import BuiltEngine
from headrace.engine.sequence import AdmissionTimedOut, Admitted, Computed, Finished, Sampled, Scored, Started
from headrace.request import FinishReason, PromptLogprobs, Sampling
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
from tests.support.node.engine_pair import move

POLICIES = ("none", "align", "every", "branch")
ANSWER = replace(GREEDY, max_tokens=40)  # with a prompt of 20 tokens: 4 blocks, 2 at first and 1 of headroom
FIRST, SECOND = random_prompt(20, 1), random_prompt(20, 2)


def two_where_one_and_a_half_fit(path, sampling: Sampling = ANSWER, **changes: object) -> tuple[BuiltEngine, Run, Run]:
    """The second will be preempted with 48 tokens computed: it needs its fourth block when none is left."""
    built = engine_of(path, num_blocks=7, num_slots=8, **changes)
    return built, submit(built, request(FIRST, sampling)), submit(built, request(SECOND, sampling))


def step_until(built: BuiltEngine, condition) -> None:
    for _ in range(1000):
        if condition():
            return
        built.engine.admit()
        built.engine.step()
        built.engine.cache.check()
    raise AssertionError("it did not happen within 1,000 steps")


def step_until_preempted(built: BuiltEngine, run: Run) -> None:
    step_until(built, lambda: run.sequence.num_preemptions)
    assert run.sequence.claim is None


@pytest.mark.parametrize("family", ["granite", "qwen35"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_preempted_answer_equals_one_without_preemption(family, policy, tiny_checkpoint) -> None:
    path = tiny_checkpoint(family)
    built, first, second = two_where_one_and_a_half_fit(path, checkpoint_policy=policy)
    serve(built, first, second)
    assert (first.sequence.num_preemptions, second.sequence.num_preemptions) == (0, 1)
    assert built.engine.preemptions == 1
    for run, prompt in ((first, FIRST), (second, SECOND)):
        assert run.tokens == generate(small_engine(path), request(prompt, ANSWER)).tokens
    assert_nothing_in_use(built)


def test_what_is_still_cached_is_not_computed_again(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    resumed, first, second = two_where_one_and_a_half_fit(path)
    serve(resumed, first, second)
    # Preempted on a boundary: the decode had left a checkpoint there.
    assert resumed.engine.recomputed_tokens == 0
    assert resumed.engine.computed_tokens == 2 * 59
    over, *runs = two_where_one_and_a_half_fit(path, checkpoint_policy="none")
    serve(over, *runs)
    assert over.engine.recomputed_tokens == 48
    assert over.engine.computed_tokens == 2 * 59 + 48
    assert [run.sequence.num_prefilled for run in runs] == [20, 20]


def test_admission_progress_and_end_are_told_once(tiny_checkpoint) -> None:
    built, first, second = two_where_one_and_a_half_fit(tiny_checkpoint("granite"), checkpoint_policy="none")
    serve(built, first, second)
    kinds = [type(event) for event in second.events]
    assert kinds == [Admitted, Started, Computed, *[Sampled] * 40, Finished]
    assert second.events[2] == Computed(20)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
        {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.5, "min_tokens": 35, "ignore_eos": False},
    ],
    ids=["sampled", "truncated", "penalties", "min_tokens"],
)
def test_sampling_goes_on_as_if_nothing_had_happened(changes, tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    sampling = replace(ANSWER, **changes)
    built, first, second = two_where_one_and_a_half_fit(path, sampling, checkpoint_policy="none")
    serve(built, first, second)
    assert second.sequence.num_preemptions == 1
    alone = generate(small_engine(path), request(SECOND, sampling))
    assert second.tokens == alone.tokens
    assert second.events[-1] == alone.events[-1]


def test_logprobs_go_on_after_a_preemption(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    sampling = replace(ANSWER, logprobs=3)
    built, first, second = two_where_one_and_a_half_fit(path, sampling, checkpoint_policy="none")
    serve(built, first, second)
    alone = generate(small_engine(path), request(SECOND, sampling))
    ours, expected = ([e.token for e in run.events if isinstance(e, Sampled)] for run in (second, alone))
    assert [token.id for token in ours] == [token.id for token in expected]
    for token, other in zip(ours, expected, strict=True):
        assert token.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
        assert [a.id for a in token.logprobs.top] == [a.id for a in other.logprobs.top]


def test_a_stop_token_after_a_preemption_ends_the_answer(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    free = generate(small_engine(path), request(SECOND, ANSWER)).tokens
    stopper = next(token for i, token in enumerate(free) if i > 32 and token not in free[:i])
    sampling = replace(ANSWER, stop_token_ids=(stopper,))
    built = engine_of(path, num_blocks=7, num_slots=8)
    first, second = submit(built, request(FIRST, ANSWER)), submit(built, request(SECOND, sampling))
    serve(built, first, second)
    assert second.sequence.num_preemptions == 1
    assert second.tokens == free[: free.index(stopper) + 1]
    assert second.events[-1] == Finished(FinishReason.STOP)


def test_a_stop_while_preempted_ends_the_answer(tiny_checkpoint) -> None:
    built, first, second = two_where_one_and_a_half_fit(tiny_checkpoint("granite"))
    step_until_preempted(built, second)
    built.engine.finish(second.sequence, FinishReason.STOP)
    assert second.events[-1] == Finished(FinishReason.STOP)
    assert built.engine.num_waiting == 0
    serve(built, first, second)
    assert len(second.tokens) < 40
    assert_nothing_in_use(built)


def test_an_abort_while_preempted_leaves_nothing_behind(tiny_checkpoint) -> None:
    built, first, second = two_where_one_and_a_half_fit(tiny_checkpoint("granite"))
    step_until_preempted(built, second)
    built.engine.release(second.sequence)
    assert built.engine.num_waiting == 0
    serve(built, first)
    assert not second.is_finished
    assert_nothing_in_use(built)


def test_aborts_and_stops_after_a_preemption_give_everything_back(tiny_checkpoint) -> None:
    for end in ("stop", "abort"):
        for steps_later in range(5):
            built, first, second = two_where_one_and_a_half_fit(
                tiny_checkpoint("granite"), checkpoint_policy="none", max_step_tokens=16
            )
            step_until_preempted(built, second)
            serve(built, first)
            for _ in range(steps_later):  # it is admitted again, prefills in chunks of 16, decodes
                built.engine.admit()
                built.engine.step()
            if end == "stop":
                built.engine.finish(second.sequence, FinishReason.STOP)
                assert second.events[-1] == Finished(FinishReason.STOP)
            built.engine.release(second.sequence)
            built.engine.cache.check()
            assert_nothing_in_use(built)


def test_a_preempted_request_goes_before_new_ones_and_has_no_deadline(tiny_checkpoint) -> None:
    built, first, second = two_where_one_and_a_half_fit(tiny_checkpoint("granite"))
    late, third = (submit(built, request(random_prompt(20, seed), ANSWER)) for seed in (3, 4))
    step_until_preempted(built, second)
    for run in (second, late):
        run.sequence.job = replace(run.sequence.job, admit_by_s=time.monotonic() - 1)
    assert built.engine.next_deadline_s() == late.sequence.job.admit_by_s
    built.engine.admit()
    assert isinstance(late.events[-1], AdmissionTimedOut)
    assert isinstance(second.events[-1], Sampled) and not third.events
    step_until(built, lambda: first.is_finished)
    built.engine.release(first.sequence)
    built.engine.admit()
    assert second.sequence.claim is not None
    serve(built, second, third)
    assert len(second.tokens) == len(third.tokens) == 40


def test_the_only_running_request_waits_for_blocks_that_a_reservation_holds(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    built = engine_of(path, num_blocks=8, num_slots=8)
    run = submit(built, request(FIRST, replace(GREEDY, max_tokens=100)))
    built.engine.admit()
    landing = submit(built, request(SECOND, ANSWER), hit_policy=lambda hit: ReceiveState())
    step_until_preempted(built, run)
    assert not built.engine.step() and built.engine.num_running == 0
    built.engine.admit()
    assert built.engine.num_waiting == 1 and landing.sequence.claim is not None
    built.engine.release(landing.sequence)  # its transfer has failed
    serve(built, run)
    assert run.tokens == generate(small_engine(path), request(FIRST, replace(GREEDY, max_tokens=100))).tokens
    assert_nothing_in_use(built)


@pytest.mark.parametrize("policy", ["none", "branch"])
def test_an_answer_that_began_with_a_transfer_continues_from_what_this_engine_has(policy, tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    source, built = small_engine(path), engine_of(path, num_blocks=7, num_slots=8, checkpoint_policy=policy)
    here = submit(source, request(SECOND, ANSWER), max_new=1)
    run_all(source)
    first = submit(built, request(FIRST, ANSWER))
    there = submit(built, request(SECOND, ANSWER), hit_policy=lambda hit: ReceiveState())
    built.engine.admit()
    move(source, here, built, there)
    built.engine.run_decode(there.sequence, here.tokens[0])
    serve(built, first, there)
    assert there.sequence.num_preemptions == 1
    assert here.tokens + there.tokens == generate(source, request(SECOND, ANSWER)).tokens
    assert there.sequence.num_prefilled == 0  # what it computes again is no part of its prompt's cost
    assert [type(event) for event in there.events] == [Admitted, *[Sampled] * 39, Finished]
    assert_nothing_in_use(built)


def scores(run: Run) -> list[PromptLogprobs]:
    return [event.logprobs for event in run.events if isinstance(event, Scored)]


@pytest.mark.parametrize("policy", ["none", "branch"])
def test_a_prompt_that_is_scored_is_scored_once_when_preempted_in_the_middle(policy, tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    prompt = random_prompt(160)
    built = engine_of(path, 15, 8, max_step_tokens=9, max_running=8, checkpoint_policy=policy)
    older = submit(built, request(FIRST, replace(GREEDY, max_tokens=60)))
    step_until(built, lambda: len(older.sequence.tokens) == 47)
    scored = submit(built, request(prompt, replace(GREEDY, prompt_logprobs=2)), prompt_logprobs=2)
    step_until_preempted(built, scored)
    assert 0 < sum(len(part.logprobs) for part in scores(scored)) < len(prompt) - 1
    serve(built, older, scored)
    alone = generate(small_engine(path), request(prompt, replace(GREEDY, prompt_logprobs=2)), prompt_logprobs=2)
    assert [part.start for part in scores(scored)] == [1, *(part.end for part in scores(scored)[:-1])]
    ours, expected = ([p for part in scores(run) for p in part.logprobs] for run in (scored, alone))
    assert ours == pytest.approx(expected, abs=1e-4)
    assert scored.tokens == alone.tokens
    assert [e.num_tokens for e in scored.events if isinstance(e, Computed)] == sorted(
        {e.num_tokens for e in scored.events if isinstance(e, Computed)}
    )


def test_prompt_logprobs_are_not_told_again_after_a_preemption(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    sampling = replace(ANSWER, prompt_logprobs=1)
    built = engine_of(path, num_blocks=7, num_slots=8)
    first = submit(built, request(FIRST, ANSWER))
    second = submit(built, request(SECOND, sampling), prompt_logprobs=1)
    serve(built, first, second)
    assert second.sequence.num_preemptions == 1
    assert sum(len(part.logprobs) for part in scores(second)) == len(SECOND) - 1
    assert second.tokens == generate(small_engine(path), request(SECOND, ANSWER)).tokens


def test_a_checkpoint_in_the_answer_is_superseded_after_a_preemption_too(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    built, first, second = two_where_one_and_a_half_fit(path)
    serve(built, first, second)
    # 59 tokens computed: the newest boundary of the answer is 48, that of the prompt 16.
    assert second.sequence.all_checkpoints == (16, 48)
    published = built.engine.cache.match(second.sequence.hasher.keys, max_tokens=59)
    assert published.state_tokens == 48


def test_a_long_answer_that_was_asked_for_is_not_paid_for_in_advance(tiny_checkpoint) -> None:
    built = engine_of(tiny_checkpoint("granite"), num_blocks=20, num_slots=8)
    run = submit(built, request(FIRST, replace(GREEDY, max_tokens=290)))
    built.engine.admit()
    assert built.engine.cache.stats().blocks.in_use == 3
    serve(built, run)
    assert len(run.tokens) == 290


def test_a_newcomer_leaves_a_block_for_each_running_request(tiny_checkpoint) -> None:
    built = engine_of(tiny_checkpoint("granite"), num_blocks=6, num_slots=8)
    first, second = submit(built, request(FIRST, ANSWER)), submit(built, request(SECOND, ANSWER))
    built.engine.admit()
    assert second.sequence.claim is None  # its three blocks would be the last
    serve(built, first, second)
    assert built.engine.preemptions == 0
    assert len(second.tokens) == 40


def test_a_newcomer_leaves_a_block_for_each_that_waits_for_its_state(tiny_checkpoint) -> None:
    built = engine_of(tiny_checkpoint("granite"), num_blocks=10, num_slots=8)
    expecting = [
        submit(built, request(random_prompt(20, seed), ANSWER), hit_policy=lambda hit: ReceiveState())
        for seed in range(3)
    ]
    built.engine.admit()
    assert [run.sequence.claim is not None for run in expecting] == [True, True, False]
    built.engine.release(expecting[0].sequence)
    built.engine.admit()
    assert expecting[2].sequence.claim is not None
    for run in expecting:
        built.engine.release(run.sequence)
    assert_nothing_in_use(built)


def test_many_that_outgrow_the_cache_all_finish_in_the_end(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    built = engine_of(path, num_blocks=18, num_slots=6)
    asked = [request(random_prompt(10 + i, i), replace(GREEDY, max_tokens=60)) for i in range(12)]
    runs = [submit(built, one) for one in asked]
    serve(built, *runs)
    assert built.engine.preemptions > 0
    roomy = small_engine(path)
    assert [run.tokens for run in runs] == [generate(roomy, one).tokens for one in asked]
    assert_nothing_in_use(built)
