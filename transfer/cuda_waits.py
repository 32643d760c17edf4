"""Waiting for a stream from an event loop: one poller queries the oldest event, and further waiters cost nothing.

Work on a stream is done in the order in which it was enqueued, so only its oldest event need be queried.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class StreamEvent(Protocol):
    """`torch.cuda.Event`; one that is done may be recorded again."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class StreamWaits:
    """The waiters for one stream. Belongs to one event loop.

    threads   one of them sleeps until the oldest event when that takes longer than `spin_s`
    """

    def __init__(self, new_event: Callable[[], StreamEvent], threads: Executor, spin_s: float) -> None:
        self._new_event = new_event
        self._threads = threads
        self._spin_s = spin_s
        self._idle: list[StreamEvent] = []
        self._waiting: deque[tuple[StreamEvent, asyncio.Future[Any], object]] = deque()
        self._is_polling = False
        self._sleep_at_s = 0.0

    def until_done(self, stream: Any, result: Result) -> asyncio.Future[Result]:
        """`result`, once everything enqueued on the stream so far is done. Fails with the device's error."""
        loop = asyncio.get_running_loop()
        event = self._idle.pop() if self._idle else self._new_event()
        event.record(stream)
        done: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((event, done, result))
        if not self._is_polling:
            self._is_polling = True
            self._sleep_at_s = loop.time() + self._spin_s
            loop.call_soon(self._poll)
        return done

    def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._finish_oldest():
                self._sleep_at_s = loop.time() + self._spin_s
        except Exception as error:  # the device failed: nothing enqueued there will ever be done
            self._fail(error)
        if not self._waiting:
            self._is_polling = False
        elif loop.time() <= self._sleep_at_s:
            loop.call_soon(self._poll)
        else:
            asleep = loop.run_in_executor(self._threads, self._waiting[0][0].synchronize)
            asleep.add_done_callback(self._woken)

    def _woken(self, asleep: asyncio.Future[None]) -> None:
        if not asleep.cancelled():
            asleep.exception()  # a device's failure: polling finds it, too
            self._poll()

    def _finish_oldest(self) -> bool:
        """Resolves the waiters whose events are done; returns whether there were any."""
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
