"""The cluster benchmarks' processes and client: failed starts leave nothing running, times are those of tokens."""

import time
from pathlib import Path

import pytest

from benchmarks.cluster.agents import ChatRun, Turn
from benchmarks.cluster.client import Answer
from benchmarks.cluster.processes import ClusterFailed, Processes
from benchmarks.router.workload import ChatShape
from tests.support.patience import PATIENCE_S

MODEL = Path(__file__).parents[3] / "tiny_models" / "headrace-tiny-granite-h"


def test_tokens_of_one_event_share_its_wait() -> None:
    answer = Answer(9.0, (10.0, 11.0, 13.0, 13.0, 14.0), (1, 2, 3, 4, 5), {})
    assert answer.first_token_s == 1.0
    assert answer.gaps_s == [1.0, 1.0, 1.0, 1.0]


def turn(number: int, sent_s: float, first_s: float, cached: int) -> Turn:
    usage = {"prompt_tokens_details": {"cached_tokens": cached}, "headrace": {"path": "local"}}
    return Turn(number, 100, Answer(sent_s, (first_s, first_s + 0.5), (1, 2), usage))


def test_chats_are_measured_from_the_third_round_until_the_last_one_begins() -> None:
    run = ChatRun(ChatShape(at_once=2, total=8), begun_s=[0.0, 0.0, 5.0, 5.0, 10.0, 10.0, 20.0, 20.0])
    warm_up, tail = turn(0, 0.0, 4.0, 0), turn(0, 20.0, 24.0, 0)
    run.turns = [warm_up, turn(0, 10.0, 11.0, 0), turn(1, 12.0, 12.2, 80), turn(1, 13.0, 13.4, 70), tail]
    figures = run.figures()
    assert (figures.requests_per_s, figures.cached_share, figures.paths) == (0.3, 0.5, {"local": 3})
    assert figures.first_turns_s[0] == pytest.approx(1.0)
    assert figures.later_turns_s[0] == pytest.approx(0.3)
    assert figures.gaps_s == pytest.approx((0.5, 0.5, 0.5))


def test_a_turn_counts_by_its_share_of_time_in_the_steady_part() -> None:
    """Four agents whose turns take 4 s have one turn a second, wherever waves of turns stand at the edges."""
    for shift_s in (0.0, 0.5, 3.5):
        run = ChatRun(ChatShape(at_once=4, total=12), begun_s=[0.0] * 8 + [20.0 + shift_s] * 3 + [30.0])
        run.turns = [turn(0, 4.0 * wave, 4.0 * wave + 3.5, 0) for wave in range(10) for _ in range(4)]
        assert run.figures().requests_per_s == pytest.approx(1.0)


def test_cached_tokens_of_a_turn_at_the_edge_count_by_the_same_share() -> None:
    run = ChatRun(ChatShape(at_once=1, total=4), begun_s=[0.0, 0.0, 2.0, 10.0])
    run.turns = [turn(0, 0.0, 3.5, 100), turn(0, 4.0, 9.5, 0)]  # half of the first, all of the second
    assert run.figures().cached_share == pytest.approx(0.5 * 100 / 150)


def test_a_run_too_short_to_be_steady_is_refused() -> None:
    run = ChatRun(ChatShape(at_once=2, total=2), begun_s=[0.0, 0.0], turns=[turn(0, 0.0, 1.0, 0)])
    with pytest.raises(ValueError, match="let more chats follow"):
        run.figures()


def test_a_node_that_does_not_start_is_named_and_nothing_is_left_running(tmp_path: Path) -> None:
    nodes = {"p0": ("prefill", {"engine": {"cache_bytes": 1}})}
    with pytest.raises(ClusterFailed, match=r"p0 did not start[\s\S]*raise cache_bytes"):  # noqa: SIM117
        with Processes(tmp_path, MODEL, nodes) as cluster:
            cluster.wait_ready(time.perf_counter() + PATIENCE_S)
    assert [child.popen.poll() is None for child in cluster._children] == [False, False]
