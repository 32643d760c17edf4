"""An engine that stands still is noticed without its thread."""

import re
import threading
import time
from collections.abc import Callable

from node_runtime.watchdog import EXIT_STATUS, SHORT_S, Heart, Watchdog
from tests.support.patience import PATIENCE_S


def test_the_sleep_of_an_idle_engine_is_no_stall() -> None:
    watchdog = Watchdog("d0", lambda: 7, 60.0)
    for now_s in (0.0, SHORT_S / 2 - 0.1, SHORT_S - 0.1):
        watchdog.look(now_s)
    assert watchdog.stalled_s == 0
    watchdog.look(SHORT_S)
    assert watchdog.stalled_s == SHORT_S


def test_a_process_whose_engine_stands_still_for_too_long_ends(monkeypatch, caplog) -> None:
    assert ended(monkeypatch) == [EXIT_STATUS]
    (seconds,) = re.findall(r"d0: the engine has stood still for (\S+) s \(watchdog_s 0.5\): this process", caplog.text)
    assert float(seconds) >= 0.5


def test_it_ends_without_a_file_for_the_stacks_of_its_threads(monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert ended(monkeypatch) == [EXIT_STATUS]


def test_it_ends_while_the_log_takes_nothing(monkeypatch) -> None:
    takes_again = threading.Event()
    monkeypatch.setattr("node_runtime.watchdog.LAST_WORDS_S", 0.05)
    monkeypatch.setattr("node_runtime.watchdog.log.critical", lambda *_: takes_again.wait(PATIENCE_S))
    assert ended(monkeypatch) == [EXIT_STATUS]
    takes_again.set()


def test_it_watches_even_if_no_process_can_be_started_to_watch_it(monkeypatch, caplog) -> None:
    def no_more_processes(name: str, limit_s: float) -> Heart:
        raise BlockingIOError("Resource temporarily unavailable")

    assert ended(monkeypatch, no_more_processes) == [EXIT_STATUS]
    assert "d0: no pulse watcher" in caplog.text


def ended(monkeypatch, pulse: Callable[[str, float], Heart] | None = None) -> list[int]:
    """The statuses with which the watchdog of an engine without turns ended its process."""
    monkeypatch.setattr("node_runtime.watchdog.SHORT_S", 0.0)
    statuses: list[int] = []
    is_over = threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        is_over.set()

    Watchdog("d0", lambda: 7, 0.5, end, pulse or FakePulse).start()
    assert is_over.wait(PATIENCE_S)
    return statuses


class FakePulse:
    """A pulse that nobody watches."""

    def __init__(self, name: str, limit_s: float) -> None:
        self.beats = 0
        self.is_closed = threading.Event()

    def beat(self) -> None:
        self.beats += 1

    def close(self) -> None:
        self.is_closed.set()


def test_each_look_is_a_beat_of_the_pulse_which_ends_with_the_watchdog() -> None:
    pulse = FakePulse("d0", 60.0)
    watchdog = Watchdog("d0", lambda: 7, 60.0, pulse=lambda name, limit_s: pulse)
    watchdog.start()
    deadline_s = time.monotonic() + PATIENCE_S
    while pulse.beats < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    watchdog.stop()
    assert pulse.is_closed.wait(PATIENCE_S)
