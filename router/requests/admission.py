"""How many requests work at a time, who waits, and who is turned away."""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus
from types import TracebackType

from router.errors import ApiError


class Admission:
    """First come, first served: `max_concurrent` at work, `max_queue` waiting, the rest refused."""

    def __init__(self, max_concurrent: int, max_queue: int) -> None:
        self._free = max_concurrent
        self._max_queue = max_queue
        self._waiting: deque[Ticket] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def line_up(self, count: int) -> list[Ticket]:
        """Tickets for `count` requests of one client, all or none; raises 429 when the queue has no room.

        Every ticket must be entered or dropped: both give its place back.
        """
        waiting_after = self.waiting + count - self._free
        if waiting_after > self._max_queue:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self.waiting} requests wait and {count} more do not fit: max_queue is {self._max_queue}; "
                "try again later",
                code="queue_full",
                retry_after_s=1,
            )
        tickets = [Ticket(self) for _ in range(count)]
        self._waiting.extend(tickets)
        self._call_next()
        return tickets

    def _call_next(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            self._waiting.popleft().turn.set()

    def _leave(self, ticket: Ticket) -> None:
        if ticket.turn.is_set():
            self._free += 1
        else:
            self._waiting.remove(ticket)
        self._call_next()


class Ticket:
    """One place in the line. `async with ticket:` waits for the turn and holds it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._dropped = False
        self.turn = asyncio.Event()

    def drop(self) -> None:
        """Gives the place back; more than once does no harm."""
        if not self._dropped:
            self._dropped = True
            self._admission._leave(self)

    async def __aenter__(self) -> None:
        try:
            await self.turn.wait()
        except BaseException:
            self.drop()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
