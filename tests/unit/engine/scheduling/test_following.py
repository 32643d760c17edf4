"""Prompts that arrive together and begin alike: what they share is computed once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cache.hashing import PrefixHasher
from headrace.engine.build import BuiltEngine
from headrace.engine.scheduling.following import Following, best_following, cost_alone, shared_blocks
from headrace.engine.sequence import Job, Sequence
from tests.support.engine.driving import (
    GREEDY,
    Run,
    assert_nothing_in_use,
    engine_of,
    generate,
    request,
    resume_locally,
    serve,
    small_engine,
    submit,
)

SYSTEM = [5 + i % 100 for i in range(480)]
SHORT = replace(GREEDY, max_tokens=2)
NUM_CHATS = 6


def chat(number: int, length: int = 20) -> list[int]:
    return SYSTEM + [110 + (number * 7 + i) % 100 for i in range(length)]


def submit_chats(built: BuiltEngine, **more: object) -> list[Run]:
    return [submit(built, request(chat(i), SHORT, **more)) for i in range(NUM_CHATS)]


def one_step(built: BuiltEngine) -> None:
    built.engine.admit()
    built.engine.step()
    built.engine.cache.check()


@pytest.fixture(scope="module")
def model(tiny_checkpoint) -> Path:
    path: Path = tiny_checkpoint("granite")
    return path


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("hints", [(), (480,)])
def test_what_prompts_share_is_computed_once_when_they_arrive_together(model, hints, overlap) -> None:
    built = small_engine(model, overlap=overlap)
    runs = submit_chats(built, boundaries=hints)
    serve(built, *runs)
    prefilled = sum(run.sequence.num_prefilled for run in runs)
    assert prefilled == len(SYSTEM) + NUM_CHATS * 20, "they resume where they part"
    alone = generate(small_engine(model), runs[-1].sequence.request)
    assert runs[-1].tokens == alone.tokens
    assert_nothing_in_use(built)


def test_followers_hold_nothing_and_count_only_what_they_will_compute(model) -> None:
    built = small_engine(model)
    submit_chats(built)
    one_step(built)
    assert built.engine.num_running == 1
    assert built.engine.load.waiting_tokens == len(SYSTEM) + NUM_CHATS * 20 - 256


def test_when_the_leader_leaves_the_next_one_leads_at_once(model) -> None:
    built = small_engine(model, max_step_tokens=64)
    runs = submit_chats(built)
    one_step(built)
    built.engine.release(runs[0].sequence)
    one_step(built)
    assert runs[1].sequence.num_computed == 64
    serve(built, *runs[1:])
    assert sum(run.sequence.num_prefilled for run in runs[1:]) == len(SYSTEM) + (NUM_CHATS - 1) * 20


def test_nobody_waits_for_a_leader_that_is_paused(model) -> None:
    built = small_engine(model, max_step_tokens=64)
    leader, follower = submit(built, request(chat(1), SHORT)), submit(built, request(chat(2), SHORT))
    one_step(built)
    built.engine.pause(leader.sequence)
    serve(built, follower)
    built.engine.unpause(leader.sequence)
    serve(built, leader)


def test_nobody_waits_where_no_checkpoint_is_kept(model) -> None:
    built = small_engine(model, checkpoint_policy="none", max_step_tokens=64)
    submit_chats(built)
    one_step(built)
    assert built.engine.num_running == NUM_CHATS


def test_a_prompt_that_shares_little_with_a_slow_one_does_not_wait_for_it(model) -> None:
    """The other is behind a long one, and would be there only when this one could be done."""
    built = small_engine(model, max_step_tokens=64)
    first = submit(built, request([9] * 300, SHORT))
    slow = submit(built, request(SYSTEM[:32] + [8] * 290, SHORT))
    one_step(built)
    short = submit(built, request([*SYSTEM[:32], 7], SHORT))
    one_step(built)
    assert short.sequence.claim is not None
    serve(built, first, slow, short)


def test_without_room_for_the_checkpoint_followers_compute_for_themselves(model) -> None:
    built = engine_of(model, 200, 3, max_step_tokens=64)
    runs = submit_chats(built)
    serve(built, *runs)
    assert all(len(run.tokens) == 2 for run in runs)
    assert_nothing_in_use(built)


def test_a_scored_prompt_needs_all_its_logits_and_waits_for_nobody(model) -> None:
    built = small_engine(model, max_step_tokens=64)
    leader = submit(built, request(chat(1), SHORT))
    scored = submit(built, request(chat(2), SHORT), prompt_logprobs=0)
    one_step(built)
    assert scored.sequence.claim is not None
    serve(built, leader, scored)


# ------------------------------------------------------------ the pure parts


def sequence(prompt: list[int], arrival: float = 0.0, num_computed: int = 0) -> Sequence:
    hasher = PrefixHasher(16)
    hasher.extend(prompt)
    made = Sequence(Job(request(prompt), resume_locally, 1, 100.0, print), hasher, arrival=(arrival, 0))
    made.num_computed = num_computed
    return made


@pytest.mark.parametrize("common", [0, 1, 2, 7, 30])
def test_shared_blocks_are_those_before_the_first_that_differs(common: int) -> None:
    keys, others = (sequence([5] * 16 * common + [last] * 64).keys for last in (6, 7))
    assert shared_blocks(keys, others) == common


def test_the_leader_is_the_one_that_shares_most_and_of_equals_the_farthest() -> None:
    follower = sequence(chat(1))
    near, far, other = sequence(chat(2)), sequence(chat(3), num_computed=64), sequence(SYSTEM[:160] + [7] * 400)
    assert best_following(follower, [near, far, other], 16) == Following(far, 480)
    assert best_following(follower, [other], 16) == Following(other, 160)
    assert best_following(follower, [sequence([9] * 600), sequence(chat(2), num_computed=480)], 16) is None
    assert best_following(sequence(SYSTEM), [near], 16) == Following(near, 464), "its last token is always computed"


def test_waiting_pays_if_the_leader_is_not_later_than_the_follower_alone() -> None:
    follower, leader = sequence(chat(1)), sequence(chat(2), num_computed=128)
    following = Following(leader, 480)

    def behind(of_leader: int, of_follower: int) -> int | None:
        return cost_alone(follower, following, 0, lambda who, own: of_leader if who is leader else of_follower)

    assert behind(0, 0) == 500
    assert behind(128, 0) == 500
    assert behind(129, 0) is None
    assert behind(1000, 900) == 1400
    assert cost_alone(follower, following, 480, lambda who, own: 0) is None, "it has all of that already"
