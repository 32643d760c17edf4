"""Admission control: bounds on running and on queued requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Collection

from router.errors import too_many_requests
from router.requests.wait_estimate import WaitEstimate

MARGIN = 1.2  # on an estimated wait: those who are admitted should not run out of time


class Admission:
    """First come, first served: `max_concurrent` requests run, `max_queue` wait, more are refused.

    A request that would wait longer than its time allows is refused at once, too.

    timeout_s      a request's whole time, its wait included
    clock          yields seconds
    nodes_line_s   returns the seconds in which the nodes will have computed the prompts that they have
    """

    def __init__(
        self,
        max_concurrent: int,
        max_queue: int,
        *,
        timeout_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        nodes_line_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._free = max_concurrent
        self._max_queue = max_queue
        self._timeout_s = timeout_s
        self._clock = clock
        self._nodes_line_s = nodes_line_s
        self._estimate = WaitEstimate(max_concurrent)
        self._waiting: deque[AdmissionPermit] = deque()
        self._running: set[AdmissionPermit] = set()

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
        if waiting_after <= 0:
            return
        if waiting_after > self._max_queue:
            raise too_many_requests(
                f"{self.waiting} requests wait and {count} more do not fit: max_queue is {self._max_queue}",
                code="queue_full",
                retry_after_s=self._wait_s(waiting_after - self._max_queue),
            )
        needed_s = MARGIN * self._wait_s(waiting_after) + self._estimate.usual_s(self._running_s())
        if needed_s > self._timeout_s:
            raise too_many_requests(
                f"{self.waiting} requests wait: a place and an answer would take about {needed_s:.0f} s, and a request "
                f"has {self._timeout_s:g} s (request_timeout_s)",
                code="wait_too_long",
                retry_after_s=needed_s - self._timeout_s,
            )

    def _wait_s(self, position: int) -> float:
        return self._estimate.wait_s(position, self._running_s(), self._nodes_line_s())

    def _running_s(self) -> list[float]:
        now_s = self._clock()
        return [now_s - permit.granted_at_s for permit in self._running]

    def _grant(self) -> None:
        while self._free and (permit := next((each for each in self._waiting if not each.held_back), None)):
            self._free -= 1
            self._waiting.remove(permit)
            self._running.add(permit)
            permit.granted_at_s = self._clock()
            permit.granted.set()

    def _leave(self, permit: AdmissionPermit) -> None:
        if permit.granted.is_set():
            self._running.remove(permit)
            self._estimate.ended(self._clock() - permit.granted_at_s)
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
        self.granted_at_s = 0.0

    def release(self) -> None:
        """Frees the place, or leaves the queue; more than once does no harm."""
        if not self._released:
            self._released = True
            self._admission._leave(self)

    def may_run(self) -> None:
        """Ends its being held back."""
        self.held_back = False
        self._admission._grant()
