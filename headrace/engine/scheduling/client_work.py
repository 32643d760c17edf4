"""Work that each client's requests have taken of one engine lately, and who is beyond a share of it. Pure: no clock."""

from __future__ import annotations

from collections.abc import Iterable

HALF_LIFE_S = 10.0
"""Seconds after which work counts half: a chat's next turn finds most of its last one forgotten, a queue's does not."""
FORGOTTEN = 1.0  # less than a token: as good as nothing

SHARES = 2.0
"""A client's share, in means of the other clients' work: who has had more is beyond it."""


class ClientWork:
    """Sums of costs by client, in tokens at depth 0, which decay with time; a client that was not seen has none.

    `pass_time` says when it is; all else is as of then.
    """

    def __init__(self) -> None:
        self._work: dict[int, float] = {}  # of clients, as of `_since_s`
        self._total = 0.0
        self._since_s = 0.0
        self._kept = 1.0  # share of the work as of `_since_s` that still counts

    def __len__(self) -> int:
        return len(self._work)

    def pass_time(self, now_s: float, present: Iterable[int] = ()) -> None:
        """Moves on to `now_s`. Clients whose work has decayed are forgotten, but not those that are `present`."""
        self._kept = 0.5 ** ((now_s - self._since_s) / HALF_LIFE_S)
        if self._kept < 0.5:
            left = ((client, work * self._kept) for client, work in self._work.items())
            self._work = {client: work for client, work in left if work >= FORGOTTEN}
            self._total = sum(self._work.values())
            self._since_s, self._kept = now_s, 1.0
        for client in present:
            self._work.setdefault(client, 0.0)

    def of(self, client: int) -> float:
        """The client's work."""
        return self._work.get(client, 0.0) * self._kept

    def add(self, client: int, cost: float) -> None:
        """Counts work of the client's, done now."""
        self._work[client] = self._work.get(client, 0.0) + cost / self._kept
        self._total += cost / self._kept

    def is_over_share(self, client: int) -> bool:
        """True if the client has had more than SHARES times the mean of the others; a lone client never has."""
        work, num_others = self._work.get(client, 0.0), len(self._work) - 1
        return num_others > 0 and work * self._kept >= FORGOTTEN and work * num_others > SHARES * (self._total - work)
