"""Leases: expiring claims that keep blocks or a checkpoint from eviction.

A lease owns one way to give something back and calls it exactly once: when it is released, or when its
deadline has passed and `expire` is called. Deadlines are absolute, in seconds of the clock given to the
constructor.
"""

import heapq
from collections.abc import Callable
from typing import NewType

LeaseId = NewType("LeaseId", int)


class Leases:
    """The leases of one node, e.g. on the blocks of finished prefills until their transfer is complete.

    ```python
    lease = leases.grant(partial(cache.drop, cache.hold_checkpoint(checkpoint)), deadline_s=now_s + 30)
    ```
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: dict[LeaseId, Callable[[], None]] = {}
        self._deadlines: list[tuple[float, LeaseId]] = []
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, give_back: Callable[[], None], *, deadline_s: float) -> LeaseId:
        """Own what `give_back` gives back, until released or past `deadline_s`."""
        lease = LeaseId(self._next_id)
        self._next_id += 1
        self._leases[lease] = give_back
        heapq.heappush(self._deadlines, (deadline_s, lease))
        return lease

    def release(self, lease: LeaseId) -> bool:
        """Give back now. False, with nothing done, if it was given back before, by a release or by expiry."""
        give_back = self._leases.pop(lease, None)
        if give_back is None:
            return False
        give_back()
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
        # A released lease leaves its deadline behind in the heap.
        while self._deadlines and self._deadlines[0][1] not in self._leases:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
