"""Notices that a node's engine stands still, without its thread, and ends the process.

The thread cannot be joined: it may wait in a driver for a GPU that fell off the bus, or in a kernel that never ends.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from headrace.engine.loop import IDLE_CHECK_S

log = logging.getLogger(__name__)

TICK_S = 0.25
LONGEST_TICK_S = 1.0
SHORT_S = 2 * IDLE_CHECK_S
"""A shorter stall is none: an idle engine sleeps for IDLE_CHECK_S."""
EXIT_STATUS = 70
LAST_WORDS_S = 2.0


class StallClock:
    """Seconds for which a count of turns has stood still. Pure.

    Counted in ticks of at most LONGEST_TICK_S, so that a process which was stopped as a whole, or got no processor,
    does not take its engine for hung when it goes on.
    """

    def __init__(self) -> None:
        self._turns = -1
        self._last_s = 0.0
        self._stalled_s = 0.0

    @property
    def stalled_s(self) -> float:
        return self._stalled_s if self._stalled_s >= SHORT_S else 0.0

    def tick(self, turns: int, now_s: float) -> None:
        moved, self._turns = turns != self._turns, turns
        self._stalled_s = 0.0 if moved else self._stalled_s + min(now_s - self._last_s, LONGEST_TICK_S)
        self._last_s = now_s


class Watchdog:
    """A thread that looks at an engine's turns, and ends the process when there are none for `limit_s`."""

    def __init__(
        self, name: str, turns: Callable[[], int], limit_s: float, end: Callable[[int], object] = os._exit
    ) -> None:
        self._name = name
        self._turns = turns
        self._limit_s = limit_s
        self._end = end
        self._clock = StallClock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine's last turn, if it should have had one; 0: it works, or sleeps for want of work."""
        return self._clock.stalled_s

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            self._clock.tick(self._turns(), time.monotonic())
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
