"""Clients: by their names they share places, memory and turns; a key adds a tenant, a priority and a rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from router.errors import bad_request, too_many_requests


class TokenRate:
    """A token bucket that holds one minute's tokens, and is paid afterwards.

    What a request costs is known once its prompt's hit is: so one may begin while anything is left, what it has cost is
    taken then, and the bucket may go below empty. The next one waits until that is made up for.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_s = clock()

    def change(self, per_minute: int) -> None:
        """Another rate from now on; what was used stays used."""
        self._fill()
        self._level += per_minute - self._per_minute
        self._per_minute = per_minute

    def check(self, name: str) -> None:
        """Raises ApiError (429) while the bucket is empty; Retry-After is when it no longer is."""
        self._fill()
        if self._level < 1:
            raise too_many_requests(
                f"key {name}: used its {self._per_minute} tokens a minute: prompt tokens that were not cached, and "
                "answer tokens (tokens_per_minute)",
                code="rate_limit_exceeded",
                retry_after_s=(1 - self._level) * 60 / self._per_minute,
            )

    def charge(self, num_tokens: int) -> None:
        """Takes tokens that were computed, or gives back (negative) what was taken too much."""
        self._fill()
        self._level = min(self._level - num_tokens, float(self._per_minute))

    def _fill(self) -> None:
        now_s = self._clock()
        grown = self._level + (now_s - self._filled_s) * self._per_minute / 60
        self._level, self._filled_s = min(grown, float(self._per_minute)), now_s


@dataclass(frozen=True)
class Client:
    """One of those who share the router.

    name      unlike any other client's
    tenant    is part of the salt of its requests; empty: they have the salt that they name
    priority  of its requests, where they name none
    rate      None: no limit
    """

    name: str
    tenant: str = ""
    priority: int = 0
    rate: TokenRate | None = None

    @property
    def owner(self) -> str:
        """The name under which what the client leaves here is kept: its tenant's, else its own."""
        return self.tenant or self.name

    def salt(self, given: bytes) -> bytes:
        """The salt of a request that names the salt `given`. Tenants contain no zero byte: none can name another's."""
        return self.tenant.encode() + b"\0" + given if self.tenant else given

    def priority_of(self, asked: int | None) -> int:
        """The priority of a request that asks for one, or for None; raises ApiError (400) for one below its own."""
        if asked is not None and asked < self.priority:
            raise bad_request(
                f"headrace.priority {asked}: this client may ask for {self.priority} and above (router.priorities)",
                "headrace",
                "priority_not_allowed",
            )
        return self.priority if asked is None else asked

    def check_rate(self) -> None:
        """Raises ApiError (429) while the client has used up its rate."""
        if self.rate is not None:
            self.rate.check(self.name)

    def charge(self, num_tokens: int) -> None:
        """Counts computed tokens towards its rate."""
        if self.rate is not None:
            self.rate.charge(num_tokens)
