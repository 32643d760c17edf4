"""Rounds in which what has arrived by token feeds is passed on, so that an event loop that is behind catches up.

Passing one token on costs as much as passing on all tokens of its answer that have arrived: the text is made, an event
written. A loop that has time passes each on at once. One that has not would fall further behind its nodes with each
step of theirs: it lets more arrive between two rounds instead, and its clients get the same text in fewer events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MOST_PAUSE_S = 0.02
"""A round that took longer did so for something else, such as a long prompt's text: later tokens need not wait."""


class Rounds:
    """Calls what is added, once each, in the next round.

    A round lasts until the tasks that it woke have run. The next begins no sooner than as long after its end as it
    took: tokens take half of the loop's time at most, and wait no longer than a round takes.
    """

    def __init__(self) -> None:
        self._waiting: dict[Callable[[], None], None] = {}
        self._is_planned = False
        self._began_s = self._next_s = 0.0

    def add(self, deliver: Callable[[], None]) -> None:
        """Has `deliver` called in the next round, of the running loop. It must not raise."""
        self._waiting[deliver] = None
        if not self._is_planned:
            self._is_planned = True
            self._plan(asyncio.get_running_loop())

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop.time() < self._next_s:
            loop.call_at(self._next_s, self._begin, loop)
        else:
            loop.call_soon(self._begin, loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._began_s = loop.time()
        waiting, self._waiting = self._waiting, {}
        for deliver in waiting:
            deliver()
        loop.call_soon(self._end, loop)  # behind the tasks that were woken

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        self._next_s = now_s + min(now_s - self._began_s, MOST_PAUSE_S)
        self._is_planned = bool(self._waiting)
        if self._is_planned:
            self._plan(loop)
