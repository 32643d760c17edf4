"""Turns at the parsing processes, shared fairly by clients."""

from __future__ import annotations

import asyncio
from collections import Counter

from router.errors import ApiError, too_many_requests
from router.fair_line import FairLine


class Turns:
    """As many turns at a time as there are processes; `max_parsing` have one or wait for it.

    Clients take turns, and none has all processes: a body may take one for `parse_cpu_s`, and the bodies of others
    should not wait for that. Beyond `max_parsing` the body goes that would have its turn last.
    """

    def __init__(self, num_processes: int, max_parsing: int) -> None:
        self._free = num_processes
        self._max_per_client = max(1, num_processes - 1)
        self._max_parsing = max_parsing
        self._held: Counter[str] = Counter()
        self._waiting: FairLine[_Turn] = FairLine()

    async def take(self, client: str) -> None:
        """Waits for a turn, which must be given back; raises ApiError (429) if too many wait."""
        turn = _Turn(client)
        self._waiting.join(client, turn, cost=1)
        if self._held.total() + len(self._waiting) > self._max_parsing:
            (last,) = self._waiting.last(1)
            self._waiting.leave(last)
            last.refuse(self._full())
        self._grant()
        try:
            await turn.decided.wait()
        except asyncio.CancelledError:
            if turn.is_granted:
                self.give_back(client)
            elif turn.refusal is None:
                self._waiting.leave(turn)
            raise
        if turn.refusal is not None:
            raise turn.refusal

    def give_back(self, client: str) -> None:
        """Ends a turn of this client; the next one begins."""
        self._free += 1
        self._held[client] -= 1
        self._held += Counter()  # drops the clients without turns
        self._grant()

    def _grant(self) -> None:
        while self._free and (turn := self._waiting.take(self._may_begin)) is not None:
            self._free -= 1
            self._held[turn.client] += 1
            turn.grant()

    def _may_begin(self, turn: _Turn) -> bool:
        return self._held[turn.client] < self._max_per_client

    def _full(self) -> ApiError:
        number = self._held.total() + len(self._waiting)
        message = f"{number} requests are being read: max_parsing is {self._max_parsing}"
        return too_many_requests(message, code="too_many_parsing", retry_after_s=1)


class _Turn:
    def __init__(self, client: str) -> None:
        self.client = client
        self.is_granted = False
        self.refusal: ApiError | None = None
        self.decided = asyncio.Event()

    def grant(self) -> None:
        self.is_granted = True
        self.decided.set()

    def refuse(self, error: ApiError) -> None:
        self.refusal = error
        self.decided.set()
