"""Calls in progress on a node, by the router that made them: with several routers, none sees the others' requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

MAX_NAME_LENGTH = 64


class RouterCalls:
    """Counts each call while it is open. A call without a router's name, such as a test's, counts nowhere."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @asynccontextmanager
    async def counted(self, router: str) -> AsyncIterator[None]:
        """Counts a call within the block; `router` is the caller's name, or empty."""
        router = router[:MAX_NAME_LENGTH]
        if router:
            self._open[router] += 1
        try:
            yield
        finally:
            if router:
                self._open[router] -= 1
                self._open += Counter()  # drops the routers without calls

    def counts(self) -> Mapping[str, int]:
        """Open calls of each router that has any."""
        return dict(self._open)
