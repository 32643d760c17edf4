"""Right of way for the interpreter's lock: a node's engine goes first while answers wait for its next step.

One thread of a process runs Python at a time. An engine makes a step while the device computes the one before, and all
answers wait where that takes it longer. An event loop that is busy with blocks and tokens of requests would halve its
speed; what the loop does can wait for some milliseconds, as each step ends in a wait for the device.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

LONGEST_S = 0.01
"""The longest that an event loop waits: calls and heartbeats must not depend on a step that hangs."""


PASSES = 3
"""Turns of the event loop in which tokens reach gRPC: events are handled, a task wakes for them, and it writes."""


class RightOfWay:
    """The engine's thread takes it and gives it; an event loop that follows it waits meanwhile."""

    def __init__(self) -> None:
        self._is_free = threading.Event()
        self._is_free.set()
        self._passes = 0

    @property
    def is_free(self) -> bool:
        return self._is_free.is_set()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Is taken while the block runs."""
        self._is_free.clear()
        try:
            yield
        finally:
            self._is_free.set()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Is free while the block runs, which waits for something else than the lock; then it is as before."""
        was_free = self.is_free
        self._is_free.set()
        try:
            yield
        finally:
            if not was_free:
                self._is_free.clear()

    def let_pass(self) -> None:
        """Lets the event loop handle what the engine's thread gives it now, even while it is taken: tokens to be sent.

        Without that they would go out earlier or later by what else the engine's turn has to do.
        """
        self._passes = PASSES

    def followed_by(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has an event loop wait until it is free, for LONGEST_S at most, whenever something has come to be handled.

        A loop that waits goes on once it is given, even if it is taken at once again: none starves.
        """
        selector = getattr(loop, "_selector", None)  # asyncio's own loops have one, and no other way in
        if selector is None:
            log.warning("%r has no selector: it takes half of the interpreter's time from steps", loop)
            return
        select = selector.select

        def select_and_wait(timeout: float | None = None) -> object:
            selected = select(timeout)
            if self._passes:
                self._passes -= 1
            else:
                self._is_free.wait(LONGEST_S)
            return selected

        selector.select = select_and_wait
