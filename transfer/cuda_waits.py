"""Waiting for a stream from an event loop: one poller asks for the oldest event, whoever else waits costs nothing.

Work on a stream is done in the order in which it was enqueued, so only its oldest event need be asked for.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Event(Protocol):
    """`torch.cuda.Event`, of which one that is done may be recorded anew."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class StreamWaits:
    """Waits for one stream. Belongs to one event loop.

    threads   of whom one sleeps until the oldest event when that takes longer than `spin_s`
    """

    def __init__(self, new_event: Callable[[], Event], threads: Executor, spin_s: float) -> None:
        self._new_event = new_event
        self._threads = threads
        self._spin_s = spin_s
        self._idle: list[Event] = []
        self._waiting: deque[tuple[Event, asyncio.Future[Any], object]] = deque()
        self._is_asking = False
        self._give_up_s = 0.0

    def until_done(self, stream: Any, result: Result) -> asyncio.Future[Result]:
        """`result`, once all that was enqueued on the stream so far is done. Fails as the device does."""
        loop = asyncio.get_running_loop()
        event = self._idle.pop() if self._idle else self._new_event()
        event.record(stream)
        done: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((event, done, result))
        if not self._is_asking:
            self._is_asking = True
            self._give_up_s = loop.time() + self._spin_s
            loop.call_soon(self._ask)
        return done

    def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._finish_oldest():
                self._give_up_s = loop.time() + self._spin_s
        except Exception as error:  # the device's own: nothing enqueued there will ever be done
            self._fail(error)
        if not self._waiting:
            self._is_asking = False
        elif loop.time() <= self._give_up_s:
            loop.call_soon(self._ask)
        else:
            asleep = loop.run_in_executor(self._threads, self._waiting[0][0].synchronize)
            asleep.add_done_callback(self._woken)

    def _woken(self, asleep: asyncio.Future[None]) -> None:
        if not asleep.cancelled():
            asleep.exception()  # the device's failure: asking finds it, too
            self._ask()

    def _finish_oldest(self) -> bool:
        """Those that are done; was any?"""
        found = False
        while self._waiting and self._waiting[0][0].query():
            event, done, result = self._waiting.popleft()
            self._idle.append(event)
            found = True
            if not done.done():
                done.set_result(result)
        return found

    def _fail(self, error: Exception) -> None:
        while self._waiting:
            _, done, _ = self._waiting.popleft()
            if not done.done():
                done.set_exception(error)
