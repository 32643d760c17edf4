"""Work that each client's requests have taken of one engine lately. Pure: no clock."""

from __future__ import annotations

HALF_LIFE_S = 10.0
"""Seconds after which work counts half: a chat's next turn finds most of its last one forgotten, a queue's does not."""
FORGOTTEN = 1.0  # less than a token: as good as nothing
ALWAYS_KEPT = 256  # clients


class ClientWork:
    """Sums of costs by client, which decay with time; a client that was not seen has none."""

    def __init__(self) -> None:
        self._work: dict[int, tuple[float, float]] = {}  # by client: the sum, and when it was that
        self._most = ALWAYS_KEPT

    def __len__(self) -> int:
        return len(self._work)

    def of(self, client: int, now_s: float) -> float:
        """The client's work, in tokens at depth 0."""
        cost, at_s = self._work.get(client, (0.0, now_s))
        return float(cost * 0.5 ** ((now_s - at_s) / HALF_LIFE_S))

    def add(self, client: int, cost: float, now_s: float) -> None:
        """Counts work of the client's, done now."""
        self._work[client] = (self.of(client, now_s) + cost, now_s)
        if len(self._work) > self._most:
            self._work = {each: kept for each, kept in self._work.items() if self.of(each, now_s) >= FORGOTTEN}
            self._most = max(ALWAYS_KEPT, 2 * len(self._work))
