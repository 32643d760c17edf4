"""An engine that stands still is noticed without its thread."""

import threading

import pytest

from node_runtime.watchdog import EXIT_STATUS, LONGEST_TICK_S, SHORT_S, StallClock, Watchdog
from tests.support.patience import PATIENCE_S


def stalled(*ticks: tuple[int, float]) -> float:
    clock = StallClock()
    for turns, now_s in ticks:
        clock.tick(turns, now_s)
    return clock.stalled_s


def test_an_engine_that_turns_is_not_stalled() -> None:
    assert stalled(*((turn, turn * 0.5) for turn in range(100))) == 0


def test_seconds_without_a_turn_are_counted() -> None:
    standing = [(7, 100 + 0.5 * tick) for tick in range(21)]
    assert stalled(*standing) == pytest.approx(10)
    assert stalled(*standing, (8, 111)) == 0


def test_the_sleep_of_an_idle_engine_is_no_stall() -> None:
    assert stalled((7, 0.0), (7, SHORT_S / 2 - 0.1), (7, SHORT_S - 0.1)) == 0


def test_a_process_that_was_stopped_as_a_whole_does_not_take_its_engine_for_hung() -> None:
    assert stalled((7, 0.0), (7, 1000.0)) <= LONGEST_TICK_S


def test_a_process_whose_engine_stands_still_for_too_long_ends(monkeypatch, caplog) -> None:
    assert ended(monkeypatch) == [EXIT_STATUS]
    assert "d0: the engine has stood still for 0.5 s (watchdog_s 0.5): this process ends" in caplog.text


def test_it_ends_without_a_file_for_the_stacks_of_its_threads(monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert ended(monkeypatch) == [EXIT_STATUS]


def test_it_ends_while_the_log_takes_nothing(monkeypatch) -> None:
    takes_again = threading.Event()
    monkeypatch.setattr("node_runtime.watchdog.LAST_WORDS_S", 0.05)
    monkeypatch.setattr("node_runtime.watchdog.log.critical", lambda *_: takes_again.wait(PATIENCE_S))
    assert ended(monkeypatch) == [EXIT_STATUS]
    takes_again.set()


def ended(monkeypatch) -> list[int]:
    """The statuses with which the watchdog of an engine without turns ended its process."""
    monkeypatch.setattr("node_runtime.watchdog.SHORT_S", 0.0)
    statuses: list[int] = []
    is_over = threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        is_over.set()

    Watchdog("d0", lambda: 7, 0.5, end).start()
    assert is_over.wait(PATIENCE_S)
    return statuses
