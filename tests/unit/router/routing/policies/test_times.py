"""Predicted seconds of one node, by hand: a token of a prompt takes 1 s, a step of decodes 10 s, a chunk 2 s more."""

from dataclasses import replace

import pytest

from headrace.step_costs import KEPT_SHARE, StepCosts
from headrace.wire.node_messages import Role
from router.routing.candidates import Candidate, Load
from router.routing.policies.times import (
    NO_LINE,
    answers_at_once,
    first_token_s,
    least_step_s,
    line,
    overtaken_s,
    pace,
    place_wait_s,
    prompt_wait_s,
    room_within_gap,
)

COSTS = StepCosts(step_s=9.0, decode_s=1.0, context_s=0.0, chunk_s=2.0, token_s=1.0, depth_s=0.0)


def node(*waiting: int, **load: float) -> Candidate:
    lengths = [0] * 12
    for each in waiting:
        lengths[each.bit_length() - 1] += each
    full = Load(
        waiting_tokens=sum(waiting), waiting_lengths=tuple(lengths) if waiting else (), num_waiting=len(waiting), **load
    )
    return Candidate("n", Role.BOTH, COSTS, 100, 16, 1, 1, load=full)


@pytest.mark.parametrize(
    ("gap_s", "late_s", "step_work_s", "keeps_gap"),
    [
        (None, 5.0, 100.0, True),
        (60.0, 0.0, 45.0, True),
        (60.0, 5.0, 40.0, True),
        (60.0, 90.0, 33.0, True),  # at most a fifth of the gap is left for late steps
        (20.0, 0.0, 16.0, False),
    ],
)
def test_a_step_holds_as_much_of_a_prompt_as_the_gap_leaves(
    gap_s: float | None, late_s: float, step_work_s: float, keeps_gap: bool
):
    late = node()._replace(costs=replace(COSTS, late_s=late_s))
    steps = pace(late, 1, 50, gap_s, 1.0)
    assert (steps.decode_s, steps.overhead_s) == (10.0, 12.0)
    assert (steps.step_work_s, steps.keeps_gap) == (pytest.approx(step_work_s), keeps_gap)
    assert pace(late, 0, 0, gap_s, 1.0).step_work_s == 100.0


def test_prompts_come_between_steps_that_drafts_make_longer():
    drafting = node(step_stretch=2.0)
    assert pace(drafting, 1, 50, None, 1.0).overhead_s == 22.0
    steps = pace(drafting, 1, 50, 60.0, 1.0)
    assert (steps.decode_s, steps.overhead_s, steps.step_work_s) == (10.0, 22.0, pytest.approx(35.0))
    assert first_token_s(steps, NO_LINE, 35.0) == pytest.approx(10.0 + 35.0 + 22.0), "half of a step first"


def test_a_node_leaves_out_drafts_for_a_gap():
    drafting = node(step_stretch=2.0, num_decoding=1, context_tokens=50)
    assert pace(drafting, 1, 50, 30.0, 1.0).keeps_gap
    assert least_step_s(drafting) == 10.0 + 2.0 + 16.0


@pytest.mark.parametrize(("gap_s", "room"), [(5.0, 1), (9.9, 1), (11.0, 2), (25.0, 16)])
def test_an_idle_node_has_room_for_as_many_answers_as_the_gap_leaves_of_its_step(gap_s: float, room: int):
    assert room_within_gap(node(), gap_s) == room


def test_answers_that_a_node_has_or_will_have_take_room_by_their_contexts():
    busy = node(num_decoding=2, context_tokens=300, num_coming=1)._replace(costs=replace(COSTS, context_s=0.01))
    assert room_within_gap(busy, 9.0 + 3 * 2.0) == 0
    assert room_within_gap(busy, 9.0 + 5 * 2.0) == 2


def test_prompts_of_up_to_twice_the_length_go_first():
    waiting = node(10, 60, 400).load
    assert line(waiting, COSTS, 8)[:2] == (10.0, 460.0)
    assert line(waiting, COSTS, 32)[:2] == (70.0, 400.0)
    assert line(waiting, COSTS, 24)[:2] == (10.0 + 60.0 / 2, 400.0 + 60.0 / 2)
    assert line(waiting, COSTS, 1000)[:2] == (470.0, 0.0)
    assert line(waiting, COSTS, 8).number == 3


@pytest.mark.parametrize(
    ("recent", "num_tokens", "expected_s"),
    [
        ((), 256, 0.0),
        ((0.0,) * 6 + (0.4,), 256, 80.0),  # 0.4 s of work a second is half of what the steps leave to prompts, 0.8 s
        ((0.0,) * 6 + (0.4,), 192, 80.0 / 3),  # half of those with 64 to 127 tokens have less than 96
        ((0.0,) * 6 + (0.4,), 128, 0.0),  # none is less than half as long
        ((0.0,) * 6 + (0.4,), 1, 0.0),
        ((0.0, 0.0, 5.0), 256, 2.0 * 80.0),  # two thirds of each step at the most
    ],
)
def test_shorter_prompts_that_come_meanwhile_go_first(
    recent: tuple[float, ...], num_tokens: int, expected_s: float
) -> None:
    busy = node(num_decoding=1, context_tokens=50, recent_lengths=recent)
    steps = pace(busy, 1, 50, 60.0, 1.0)._replace(step_work_s=48.0)
    assert overtaken_s(busy.load, steps, num_tokens, 1.0, 80.0) == pytest.approx(expected_s)


def test_an_idle_node_computes_a_prompt_at_once_in_whole_steps():
    steps = pace(node(), 0, 0, None, 1.0)
    assert first_token_s(steps, line(Load(), COSTS, 50), 50.0) == 50.0 + 2.0
    assert first_token_s(steps, line(Load(), COSTS, 300), 300.0) == 300.0 + 3 * 2.0


def test_a_long_prompt_delays_a_short_one_by_its_step_and_half_of_the_next():
    busy = node(1000)
    steps = pace(busy, 0, 0, None, 1.0)
    # Half of the running step of 100; then a whole step, for the long prompt fills what the short one leaves.
    assert first_token_s(steps, line(busy.load, COSTS, 20), 20.0) == 50.0 + 100.0 + 2.0
    assert prompt_wait_s(busy, 20) == 152.0 - 22.0
    assert prompt_wait_s(busy, 1000) > 1000


def test_decodes_stretch_a_prompt():
    busy = node(num_decoding=1)
    steps = pace(busy, 1, 0, 52.0 / KEPT_SHARE, 1.0)
    assert first_token_s(steps, line(busy.load, COSTS, 80), 80.0) == 10.0 / 2 + 80.0 + 2 * 12.0


def test_a_full_node_has_room_when_answers_have_ended():
    assert place_wait_s(node(free_slots=1, free_tokens=100), 100, 60.0) == 0
    assert place_wait_s(node(free_slots=0, free_tokens=100, num_decoding=4), 100, 60.0) == 60.0 / 4
    assert place_wait_s(node(free_slots=-2, free_tokens=100, num_decoding=4), 100, 60.0) == 3 * 60.0 / 4
    short = node(free_slots=1, free_tokens=100, num_decoding=4, context_tokens=400)
    assert place_wait_s(short, 300, 60.0) == 2 * 60.0 / 4


def test_answers_that_come_one_after_the_other_make_room_for_each_other() -> None:
    costs = StepCosts(step_s=5e-3, decode_s=0.0, context_s=0.0)
    coming = Load(num_decoding=10, context_tokens=1000, num_coming=30, coming_tokens=3000)
    assert answers_at_once(coming, costs, 100) == (40, 4000)
    # Half a second each; they come within two seconds.
    assert answers_at_once(coming._replace(coming_s=30 * 2.0), costs, 100) == (10, 1000)
    assert answers_at_once(coming._replace(coming_s=30 * 2.0, num_decoding=2, context_tokens=200), costs, 100) == (
        8,
        800,
    )
    assert answers_at_once(coming._replace(coming_s=30 * 0.4), costs, 100) == (40, 4000)
