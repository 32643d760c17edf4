"""Shares of a bounded quantity: how much all clients hold together, and how much each."""

from __future__ import annotations

from collections import Counter
from http import HTTPStatus

from router.errors import ApiError

RETRY_AFTER_S = 1


SPARE = 1 / 4
"""Part of the limit of all that is kept beyond it for clients that hold little."""


class Shares:
    """Units of `what` (connections, bytes) that clients hold; the limits are named as their settings are.

    little   units: a client that holds no more is refused only SPARE beyond the limit of all, so that a few who hold
             everything do not keep out the others
    """

    def __init__(
        self, what: str, limit: int, limit_name: str, limit_per_client: int | None, *, little: int = 0
    ) -> None:
        self._what = what
        self._limit = limit
        self._limit_name = limit_name
        self._limit_per_client = limit_per_client
        self._little = little
        self._held: Counter[str] = Counter()
        self.total = 0

    def of(self, client: str) -> Share:
        """An empty share; leaving it gives back what it holds."""
        return Share(self, client)

    def take(self, client: str, units: int) -> None:
        """Raises ApiError, and takes nothing, where a limit would be passed: 503 for that of all, 429 for one's own."""
        own = self._held[client] + units
        if self.total + units > self._limit * (1 + SPARE if own <= self._little else 1):
            raise self._full(HTTPStatus.SERVICE_UNAVAILABLE, f"{self._limit_name} is {self._limit}")
        if self._limit_per_client is not None and own > self._limit_per_client:
            name = f"{self._limit_name}_per_client"
            raise self._full(HTTPStatus.TOO_MANY_REQUESTS, f"{name} is {self._limit_per_client}")
        self.total += units
        self._held[client] += units

    def give_back(self, client: str, units: int) -> None:
        """Returns units that were taken."""
        self.total -= units
        self._held[client] -= units
        if not self._held[client]:
            del self._held[client]

    def _full(self, status: HTTPStatus, limit: str) -> ApiError:
        message = f"too many {self._what}: {limit}; try again later"
        code = f"too_many_{self._what.replace(' ', '_')}"
        return ApiError(status, message, code=code, retry_after_s=RETRY_AFTER_S)


class Share:
    """The units that one connection or request of a client holds."""

    def __init__(self, shares: Shares, client: str) -> None:
        self._shares = shares
        self._client = client
        self._units = 0

    def add(self, units: int) -> None:
        """Takes more; raises ApiError where a limit would be passed."""
        self._shares.take(self._client, units)
        self._units += units

    def release(self) -> None:
        """Gives everything back; more than once does no harm."""
        self._shares.give_back(self._client, self._units)
        self._units = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()
