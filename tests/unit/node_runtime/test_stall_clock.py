"""How long a count has stood still."""

import pytest

from node_runtime.stall_clock import LONGEST_TICK_S, StallClock


def stalled(*ticks: tuple[int, float]) -> float:
    clock = StallClock()
    for count, now_s in ticks:
        clock.tick(count, now_s)
    return clock.stalled_s


def test_what_counts_on_is_not_stalled() -> None:
    assert stalled(*((count, count * 0.5) for count in range(100))) == 0


def test_seconds_without_a_count_are_counted() -> None:
    standing = [(7, 100 + 0.5 * tick) for tick in range(21)]
    assert stalled(*standing) == pytest.approx(10)
    assert stalled(*standing, (8, 111)) == 0


def test_a_process_that_was_stopped_as_a_whole_takes_nothing_for_hung() -> None:
    assert stalled((7, 0.0), (7, 1000.0)) <= LONGEST_TICK_S
