"""Leases: expiring claims that keep blocks or a checkpoint from eviction.

A lease owns one way to give something back and calls it exactly once: when it is released, or when its
deadline has passed and `expire` is called. Deadlines are absolute, in seconds of the clock given to the
constructor.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

LeaseId = NewType("LeaseId", int)


@dataclass(frozen=True, slots=True)
class _Lease:
    give_back: Callable[[], None]
    deadline_s: float


class Leases:
    """The leases of one node, e.g. on the blocks of finished prefills until their hand-over lands.

    ```python
    lease = leases.grant(partial(cache.drop, cache.hold_checkpoint(checkpoint)), deadline_s=now_s + 30)
    ```
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: dict[LeaseId, _Lease] = {}
        self._deadlines: list[tuple[float, LeaseId]] = []
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, give_back: Callable[[], None], *, deadline_s: float) -> LeaseId:
        """Own what `give_back` gives back, until released or past `deadline_s`."""
        lease = LeaseId(self._next_id)
        self._next_id += 1
        self._leases[lease] = _Lease(give_back, deadline_s)
        heapq.heappush(self._deadlines, (deadline_s, lease))
        return lease

    def renew(self, lease: LeaseId, *, deadline_s: float) -> bool:
        """Move the deadline. False if the lease is released or past its deadline: it is not revived."""
        current = self._leases.get(lease)
        if current is None or current.deadline_s <= self._clock():
            return False
        self._leases[lease] = _Lease(current.give_back, deadline_s)
        heapq.heappush(self._deadlines, (deadline_s, lease))
        return True

    def release(self, lease: LeaseId) -> bool:
        """Give back now. False, with nothing done, if it was given back before, by a release or by expiry."""
        current = self._leases.pop(lease, None)
        if current is None:
            return False
        current.give_back()
        return True

    def expire(self, now_s: float | None = None) -> list[LeaseId]:
        """Give back every lease whose deadline is at or before `now_s` (default: the clock's time)."""
        now_s = self._clock() if now_s is None else now_s
        expired = []
        while (next_s := self.next_deadline_s()) is not None and next_s <= now_s:
            _, lease = self._deadlines[0]
            self.release(lease)
            expired.append(lease)
        return expired

    def next_deadline_s(self) -> float | None:
        """When `expire` should be called next; None if there is no lease."""
        # A renewed or released lease leaves its old deadline behind in the heap.
        while self._deadlines and not self._is_current(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_current(self, deadline_s: float, lease: LeaseId) -> bool:
        current = self._leases.get(lease)
        return current is not None and current.deadline_s == deadline_s
