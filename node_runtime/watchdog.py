"""Notices that a node's engine stands still, without its thread, and ends the process.

The thread cannot be joined: it may wait in a driver for a GPU that fell off the bus, or in a kernel that never ends.
Where it waits with the GIL, no thread can notice it: a small process beside this one does (`pulse_watcher.py`).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from headrace.engine.loop import IDLE_CHECK_S
from node_runtime.pulse import Pulse
from node_runtime.stall_clock import TICK_S, StallClock

log = logging.getLogger(__name__)

SHORT_S = 2 * IDLE_CHECK_S
"""A shorter stall is none: an idle engine sleeps for IDLE_CHECK_S."""
EXIT_STATUS = 70
LAST_WORDS_S = 2.0


class Heart(Protocol):
    """The sign of a process that it can run Python; tests pass a fake for `Pulse`."""

    def beat(self) -> None: ...
    def close(self) -> None: ...


class NoHeart:
    """A process that nobody watches from outside."""

    def beat(self) -> None:
        pass

    def close(self) -> None:
        pass


class Watchdog:
    """A thread that looks at an engine's turns, and ends the process when there are none for `limit_s`.

    It shows the process's pulse each time, so that one in which no thread can look ends after `limit_s`, too.
    """

    def __init__(
        self,
        name: str,
        turns: Callable[[], int],
        limit_s: float,
        end: Callable[[int], object] = os._exit,
        pulse: Callable[[str, float], Heart] = Pulse,
    ) -> None:
        self._name = name
        self._turns = turns
        self._limit_s = limit_s
        self._end = end
        self._pulse = pulse
        self._clock = StallClock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine's last turn, if it should have had one; 0: it works, or sleeps for want of work."""
        stalled_s = self._clock.stalled_s
        return stalled_s if stalled_s >= SHORT_S else 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def look(self, now_s: float) -> None:
        """Counts the time since the last look, if the engine has had no turn meanwhile."""
        self._clock.tick(self._turns(), now_s)

    def _run(self) -> None:
        heart = self._heart()
        try:
            self._watch(heart)
        finally:
            heart.close()

    def _heart(self) -> Heart:
        try:
            return self._pulse(self._name, self._limit_s)
        except OSError as error:  # no process or no pipe to be had
            log.warning("%s: no pulse watcher: a hang that keeps the GIL would go unnoticed: %s", self._name, error)
            return NoHeart()

    def _watch(self, heart: Heart) -> None:
        while not self._stopped.wait(TICK_S):
            heart.beat()
            self.look(time.monotonic())
            if self.stalled_s >= self._limit_s:
                # In another thread: the engine's may hold the log's lock, and hang in writing to a pipe that is full.
                last_words = threading.Thread(target=self._say_why, daemon=True)
                last_words.start()
                last_words.join(LAST_WORDS_S)
                self._end(EXIT_STATUS)
                return

    def _say_why(self) -> None:
        log.critical(
            "%s: the engine has stood still for %.1f s (watchdog_s %g): this process ends. Its threads:",
            self._name,
            self.stalled_s,
            self._limit_s,
        )
        with suppress(RuntimeError, ValueError, OSError):  # stderr is no file
            faulthandler.dump_traceback()
