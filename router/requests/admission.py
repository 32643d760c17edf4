"""Admission control: bounds on running and on queued requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from http import HTTPStatus

from router.errors import ApiError


class Admission:
    """First come, first served: `max_concurrent` requests run, `max_queue` wait, more are refused."""

    def __init__(self, max_concurrent: int, max_queue: int) -> None:
        self._free = max_concurrent
        self._max_queue = max_queue
        self._waiting: deque[AdmissionPermit] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def acquire(self, count: int, *, followers: Collection[int] = ()) -> list[AdmissionPermit]:
        """Permits for `count` requests of one client, all or none; raises ApiError (429) when the queue is full.

        Every permit must be released: only that frees its place. Those with an index in `followers` keep their places
        in the queue, but are passed over until `may_run`.
        """
        self._check(count)
        permits = [AdmissionPermit(self, held_back=index in followers) for index in range(count)]
        self._waiting.extend(permits)
        self._grant()
        return permits

    def check_line(self) -> None:
        """Raises ApiError (429) if not even one more request fits."""
        self._check(1)

    def _check(self, count: int) -> None:
        waiting_after = self.waiting + count - self._free
        if waiting_after > self._max_queue:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self.waiting} requests wait and {count} more do not fit: max_queue is {self._max_queue}; "
                "try again later",
                code="queue_full",
                retry_after_s=1,
            )

    def _grant(self) -> None:
        while self._free and (permit := next((each for each in self._waiting if not each.held_back), None)):
            self._free -= 1
            self._waiting.remove(permit)
            permit.granted.set()

    def _leave(self, permit: AdmissionPermit) -> None:
        if permit.granted.is_set():
            self._free += 1
        else:
            self._waiting.remove(permit)
        self._grant()


class AdmissionPermit:
    """The right of one request to run, once `granted` is set."""

    def __init__(self, admission: Admission, *, held_back: bool) -> None:
        self._admission = admission
        self.held_back = held_back
        self._released = False
        self.granted = asyncio.Event()

    def release(self) -> None:
        """Frees the place, or leaves the queue; more than once does no harm."""
        if not self._released:
            self._released = True
            self._admission._leave(self)

    def may_run(self) -> None:
        """Ends its being held back."""
        self.held_back = False
        self._admission._grant()
