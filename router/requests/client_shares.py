"""Work that each client has had lately, and which clients have had more than their share. Pure."""

from __future__ import annotations

from collections.abc import Callable

HALF_LIFE_S = 30.0
"""Seconds after which work counts half: a person's next question finds part of the last one, a crowd's finds all."""
MOST_SHARES = 2
"""Beyond so many times the mean of all clients, one has had more than its share: equals differ by chance."""
FORGOTTEN = 1.0  # less than a token: as good as nothing
RENEWED_S = 10 * HALF_LIFE_S


class ClientShares:
    """Sums of work by client, which decay with time.

    Work counts more the later it is done, and so none has to be made smaller as time passes: all sums are in units that
    grow, and only now and then brought back to tokens (forward decay, Cormode et al. 2009).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._work: dict[str, float] = {}
        self._total = 0.0
        self._since_s = clock()

    def __len__(self) -> int:
        return len(self._work)

    def add(self, client: str, work: float) -> None:
        """Counts work that a client has now; negative: what was counted too much."""
        now_s = self._clock()
        if now_s - self._since_s > RENEWED_S:
            self._renew(now_s)
        had = self._work.get(client, 0.0)
        self._work[client] = has = max(0.0, had + work * 2 ** ((now_s - self._since_s) / HALF_LIFE_S))
        self._total += has - had

    def is_exceeded(self, client: str) -> bool:
        """True if the client has had more than its share lately."""
        return self._work.get(client, 0.0) * len(self._work) > MOST_SHARES * self._total

    def _renew(self, now_s: float) -> None:
        left = 2 ** ((self._since_s - now_s) / HALF_LIFE_S)  # 0 after a night without requests
        self._work = {client: work * left for client, work in self._work.items() if work * left >= FORGOTTEN}
        self._total, self._since_s = sum(self._work.values()), now_s
