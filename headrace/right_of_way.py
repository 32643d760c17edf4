"""Right of way for the interpreter's lock: a node's engine goes first while answers wait for its next step.

One thread of a process runs Python at a time. An engine makes a step while the device computes the one before, and all
answers wait if that takes longer than the device. An event loop that is busy with other requests' blocks and tokens
would take half of the time; what it does can wait for some milliseconds, as each step ends in a wait for the device.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

LONGEST_S = 0.01
"""The longest that a turn of an event loop waits: calls and heartbeats must not depend on a step that hangs."""

TOKEN_TURNS = 3
"""Turns of the event loop in which tokens reach gRPC: events are handled, a task wakes for them, and it writes."""


class RightOfWay:
    """The engine's thread takes it and gives it; an event loop that follows it waits meanwhile.

    longest_s   that a turn of the event loop waits
    """

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._is_free = threading.Event()
        self._is_free.set()
        self._free_turns: Iterator[int] = iter(())  # two threads use it up and replace it, each in one operation

    @property
    def is_free(self) -> bool:
        return self._is_free.is_set()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Takes it for the block."""
        self._is_free.clear()
        try:
            yield
        finally:
            self._is_free.set()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Gives it for a block that waits for something else than the lock; behind it all is as before."""
        was_free = self.is_free
        self._is_free.set()
        try:
            yield
        finally:
            self._free_turns = iter(())
            if not was_free:
                self._is_free.clear()

    def let_tokens_through(self) -> None:
        """Has the event loop handle what it is given now, tokens, even if it is taken again before they are sent.

        Otherwise they would go out earlier or later by what else the engine's turn has to do.
        """
        self._free_turns = iter(range(TOKEN_TURNS))

    def followed_by(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        """Has an event loop wait until it is free, whenever something has come to be handled; returns how to undo that.

        A loop that waits goes on once it is given, even if it is taken at once again: it has its turn in each step.
        """
        selector = getattr(loop, "_selector", None)  # asyncio's own loops have one, and no other way in
        if selector is None:
            log.warning(
                "%r has no selector: beside it steps may take twice as long; in Ray, set RAY_USE_UVLOOP=0", loop
            )
            return lambda: None
        select = selector.select

        def select_and_wait(timeout: float | None = None) -> object:
            selected = select(timeout)
            if next(self._free_turns, None) is None:
                self._is_free.wait(self._longest_s)
            return selected

        def undo() -> None:
            selector.select = select

        selector.select = select_and_wait
        return undo
