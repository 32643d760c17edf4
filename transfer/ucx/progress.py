"""Drives a UCX worker from the event loop: no thread, no spinning, and nothing to do while nothing happens.

UCX has an epoll descriptor that becomes readable when the worker is armed and something happens. So a turn
is drain - route - arm: progress the worker, at most DRAIN_STEPS steps so that the loop's other work gets its
share; finish completed operations; let the transport look for announced messages; then arm. When the worker
refuses to be armed, work may be left, or polling is asked for, the next turn comes at once. An idle process sleeps in
epoll.

ucxx's own awaitables are not used: they spin until the message is there, in every progress mode (0.52).
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
"""A turn at least this often, should an event ever be missed; it also gives UCX's keepalive its turns."""


@dataclass(eq=False, slots=True)
class Operation:
    """A send or receive in flight. Holds its buffer until UCX has let go of it, whoever else forgets it.

    nonce       of the session that it is part of, None: of none. See `ProgressLoop.hasten`
    expire      called at the deadline; must make the request complete, by closing the connection it waits for. None:
                nobody knows which; the owner is told, and UCX keeps the buffer for as long as it likes
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

    route    called after each drain: take announced messages; True when it left some for the next turn
    poll_s   while operations are in flight, turns follow each other at once for so long after the last of them was
             posted or completed; 0: never. Meant for GPU memory: what UCX is armed with there costs more than asking
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
        """At the earliest deadline of an operation, or of one that has completed since: one timer for all of them."""
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
        """Post a request on `buffer` and see it through: the future is done once UCX has let go of it."""
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
        """What is in flight for this session expires then, if not sooner."""
        for operation in self._operations:
            if operation.nonce == nonce and operation.deadline_s > deadline_s:
                operation.deadline_s = deadline_s
                self._expire_at(deadline_s)

    def wake(self) -> None:
        """Take a turn soon: what was posted or closed must be progressed before UCX may be armed."""
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._turn)

    async def close(self, grace_s: float) -> None:
        """Stop, once what is in flight has completed or `grace_s` has passed; close connections before."""
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
        """True when UCX may have more to do at once."""
        return all(self.worker.progress_once() for _ in range(DRAIN_STEPS))

    def _finish_operations(self) -> None:
        completed = [operation for operation in self._operations if operation.request.completed]
        for operation in completed:
            self._operations.discard(operation)
            operation.finish()
        if completed:
            self._poll_until_s = self._loop.time() + self._poll_s

    def _expire_at(self, deadline_s: float) -> None:
        """Expire operations then, if not sooner."""
        if self._expiry is not None:
            if self._expiry.when() <= deadline_s:
                return
            self._expiry.cancel()
        self._expiry = self._loop.call_at(deadline_s, self._expire, deadline_s)

    def _expire(self, now_s: float) -> None:
        """Each whose deadline is due, once; then wait for the earliest of the others."""
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
