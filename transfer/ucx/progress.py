"""Drives a UCX worker from the event loop, without a thread or spinning; an idle process sleeps in epoll.

UCX has an epoll descriptor that becomes readable when the worker is armed and something happens. A turn is
drain - route - arm: progress the worker, at most DRAIN_STEPS steps so that the loop's other work gets its share; finish
completed operations; let the transport probe for announced messages; arm. The next turn comes at once when the worker
refuses to be armed, when work may be left, and while polling is asked for.

ucxx's own awaitables are not used: they spin until the message is there, in every progress mode (0.52). The worker,
context and requests are ucxx's private `_lib.libucxx`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

from transfer.buffers import Buffer
from transfer.protocol.errors import ConnectionLost, TransferTimeout, Truncated

DRAIN_STEPS = 64
TICK_S = 1.0
"""A turn at least this often, in case an event is missed; UCX's own keepalive also needs turns."""


@dataclass(eq=False, slots=True)
class Operation:
    """A send or receive in flight. Keeps a reference to its buffer until UCX has released it.

    nonce       of its session, or None. See `ProgressLoop.hasten`
    expire      called at the deadline; must make the request complete, by closing the connection it waits for. None:
                that connection is not known; `done` fails, and UCX keeps the buffer for as long as it likes
    done        its owner's future; fails with `ConnectionLost`, `TransferTimeout` or `Truncated`
    """

    request: Any
    buffer: Buffer
    deadline_s: float
    expire: Callable[[], None] | None
    nonce: int | None
    done: asyncio.Future[None]
    expired: bool = False

    def finish(self) -> None:
        error = self._error()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    def give_up(self) -> None:
        if not self.done.done():
            self.done.set_exception(TransferTimeout(f"{len(self.buffer)} bytes did not move by their deadline"))

    def _error(self) -> Exception | None:
        try:
            self.request.check_error()
        except ucx.UCXMessageTruncatedError as error:
            return Truncated(f"the message is longer than its buffer of {len(self.buffer)} bytes: {error}")
        except ucx.UCXError as error:
            if self.expired:
                return TransferTimeout(f"{len(self.buffer)} bytes did not move by their deadline: {error}")
            return ConnectionLost(f"{error} ({type(error).__name__})")
        return None


class ProgressLoop:
    """Owns the UCX context and worker of a process, for the running event loop.

    route    called after each drain: takes announced messages; returns True when it left some for the next turn
    poll_s   while operations are in flight, turns follow each other at once for this long after the last of them was
             posted or completed; 0: never. For GPU memory, where arming UCX costs more than polling it
    """

    def __init__(self, route: Callable[[], bool], poll_s: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._route = route
        self._poll_s = poll_s
        self._poll_until_s = 0.0
        feature = ucx.Feature
        self.context = ucx.UCXContext({}, feature_flags=(feature.TAG, feature.STREAM, feature.WAKEUP))
        self.worker = ucx.UCXWorker(self.context, enable_delayed_submission=False, enable_python_future=False)
        self.worker.init_blocking_progress_mode()
        self._fd = self.worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self._turn)
        self._operations: set[Operation] = set()
        self._scheduled: asyncio.Handle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        """One timer for all operations: at their earliest deadline, or that of one that has completed since."""
        self._tick()

    @property
    def num_operations(self) -> int:
        return len(self._operations)

    def start(
        self,
        post: Callable[[Array], Any],
        buffer: Buffer,
        deadline_s: float,
        expire: Callable[[], None] | None,
        nonce: int | None = None,
    ) -> asyncio.Future[None]:
        """Posts a request on `buffer`. The future is done once UCX has released the buffer."""
        operation = Operation(post(Array(buffer)), buffer, deadline_s, expire, nonce, self._loop.create_future())
        if operation.request.completed:  # a short one, which UCX copied
            operation.finish()
        else:
            self._operations.add(operation)
            self._expire_at(deadline_s)
            self._poll_until_s = self._loop.time() + self._poll_s
        self.wake()
        return operation.done

    def hasten(self, nonce: int, deadline_s: float) -> None:
        """Brings forward to `deadline_s` the later deadlines of this session's operations."""
        for operation in self._operations:
            if operation.nonce == nonce and operation.deadline_s > deadline_s:
                operation.deadline_s = deadline_s
                self._expire_at(deadline_s)

    def wake(self) -> None:
        """Schedules a turn: what was posted or closed must be progressed before UCX may be armed."""
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._turn)

    async def close(self, grace_s: float) -> None:
        """Stops once all operations have completed, or after `grace_s`. Close the connections first."""
        give_up_s = self._loop.time() + grace_s
        while self._operations and self._loop.time() < give_up_s:
            self.wake()
            await asyncio.sleep(0.001)
        self._ticker.cancel()
        for handle in (self._scheduled, self._expiry):
            if handle is not None:
                handle.cancel()
        self._loop.remove_reader(self._fd)

    def _turn(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        more = self._drain()
        self._finish_operations()
        more = self._route() or more
        if more or (self._operations and self._loop.time() < self._poll_until_s):
            self.wake()
        if self._scheduled is None and not self.worker.arm():
            self.wake()

    def _drain(self) -> bool:
        """Returns True when UCX may have more to do at once."""
        return all(self.worker.progress_once() for _ in range(DRAIN_STEPS))

    def _finish_operations(self) -> None:
        completed = [operation for operation in self._operations if operation.request.completed]
        for operation in completed:
            self._operations.discard(operation)
            operation.finish()
        if completed:
            self._poll_until_s = self._loop.time() + self._poll_s

    def _expire_at(self, deadline_s: float) -> None:
        """Sets the timer to `deadline_s` unless it is earlier already."""
        if self._expiry is not None:
            if self._expiry.when() <= deadline_s:
                return
            self._expiry.cancel()
        self._expiry = self._loop.call_at(deadline_s, self._expire, deadline_s)

    def _expire(self, now_s: float) -> None:
        """Expires each operation whose deadline is due, once; sets the timer to the earliest of the others."""
        self._expiry = None
        for operation in tuple(self._operations):
            if operation.expired:
                continue
            if operation.deadline_s > now_s:
                self._expire_at(operation.deadline_s)
                continue
            operation.expired = True
            if operation.expire is None:
                operation.give_up()
                continue
            operation.expire()
            self.wake()

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        self.wake()
