"""The pace of answers, by what nodes count of their drafts."""

from dataclasses import replace

import pytest

from headrace.step_costs import StepCosts
from headrace.wire.node_messages import NodeStatus
from router.routing.draft_pace import DraftPace
from tests.support.router.fake_nodes import node_status

COSTS = StepCosts(step_s=2e-3, decode_s=50e-6, context_s=0.0, check_s=1e-3, draft_s=20e-6)


def status(sampled: float, accepted: float, drafted: float, draft_steps: float, steps: float) -> NodeStatus:
    counters = {
        "sampled_tokens": sampled,
        "accepted_tokens": accepted,
        "drafted_tokens": drafted,
        "draft_steps": draft_steps,
        "timed_steps": steps,
    }
    return replace(node_status(), counters=counters, costs=COSTS, num_decoding=40, context_tokens=40_000)


def test_a_token_takes_its_share_of_a_step_with_drafts() -> None:
    pace = DraftPace()
    pace.heartbeat(status(1000, 0, 0, 0, 100), 0.0)
    assert pace.pace == pace.stretch == 1.0
    # 40 answers in 100 steps, 3 drafts of each, of which 2.4 are right; a step takes 4 ms without them, 7.4 with.
    pace.heartbeat(status(1000 + 13_600, 9_600, 12_000, 100, 200), 0.5)
    assert pace.pace == pytest.approx(7.4 / 4 / 3.4)
    assert pace.stretch == pytest.approx(7.4 / 4)


def test_steps_without_drafts_count_as_well() -> None:
    pace = DraftPace()
    pace.heartbeat(status(0, 0, 0, 0, 0), 0.0)
    # A quarter of the steps drafts.
    pace.heartbeat(status(3 * 4_000 + 13_600, 9_600, 12_000, 100, 400), 0.5)
    assert pace.pace == pytest.approx((4 + 0.25 * 3.4) / 4 * 16_000 / 25_600)
    assert pace.stretch == pytest.approx((4 + 0.25 * 3.4) / 4)


def test_drafts_that_are_wrong_slow_answers_down() -> None:
    pace = DraftPace()
    pace.heartbeat(status(0, 0, 0, 0, 0), 0.0)
    pace.heartbeat(status(4_000, 0, 12_000, 100, 100), 0.5)
    assert pace.pace == pytest.approx(7.4 / 4)


def test_the_newest_heartbeats_weigh_most() -> None:
    pace, counted = DraftPace(), [0.0] * 5
    pace.heartbeat(status(*counted), 0.0)
    for number in range(200):
        more = (13_600, 9_600, 12_000, 100, 100) if number < 100 else (4_000, 0, 12_000, 100, 100)
        counted = [before + each for before, each in zip(counted, more, strict=True)]
        pace.heartbeat(status(*counted), 0.5)
        if number == 99:
            assert pace.pace == pytest.approx(7.4 / 4 / 3.4)
    assert pace.pace == pytest.approx(7.4 / 4, rel=0.05)


def test_an_idle_node_keeps_its_pace() -> None:
    pace = DraftPace()
    pace.heartbeat(status(0, 0, 0, 0, 0), 0.0)
    counted = status(13_600, 9_600, 12_000, 100, 100)
    pace.heartbeat(counted, 0.5)
    before = pace.pace
    pace.heartbeat(replace(counted, num_decoding=0, context_tokens=0), 0.5)
    assert pace.pace == before < 1


@pytest.mark.parametrize("step_s", [0.0, 1e-12])
def test_answers_of_which_the_fit_knows_nothing_take_no_longer_than_a_step_for_each_draft(step_s: float) -> None:
    """As on a node that hardly generates."""
    pace = DraftPace()
    pace.heartbeat(status(0, 0, 0, 0, 0), 0.0)
    costs = replace(COSTS, step_s=step_s, decode_s=0.0)
    pace.heartbeat(replace(status(13_600, 9_600, 12_000, 100, 100), costs=costs), 0.5)
    assert pace.stretch == pytest.approx(4)
    assert pace.pace == pytest.approx(4 / 3.4)
