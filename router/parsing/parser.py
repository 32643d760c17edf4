"""The two places where bodies are parsed: small ones on the event loop at once, all others in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.api.generation import GenerationRequest
from router.errors import deadline_passed
from router.parsing.body_parser import BodyParser, Kind, ParseJob
from router.parsing.pool import WorkerPool
from router.text.literal_tokens import NotLoaded

SMALL_BODY_BYTES = 4 << 10
"""Parsed on the loop: 2 ms at the most, where a worker and its pipe would add half a millisecond to every chat."""


SMALL_BODY_OBJECTS = 24
"""Each message is an object, and costs the template time even if it is empty."""


class RequestParser:
    """Turns bodies into generation requests. `max_model_tokens` returns the nodes' limit, None without nodes."""

    def __init__(
        self, here: BodyParser, pool: WorkerPool, max_model_tokens: Callable[[], int | None], timeout_s: float
    ) -> None:
        self._here = here
        self._pool = pool
        self._max_model_tokens = max_model_tokens
        self._timeout_s = timeout_s

    def parse_at_once(self, kind: Kind, data: bytes) -> GenerationRequest | None:
        """The generation request of a small body, or None if it is one for a worker; raises ApiError."""
        if len(data) > SMALL_BODY_BYTES or data.count(b"{") > SMALL_BODY_OBJECTS:
            return None
        try:
            return self._here.parse(self._job(kind, data))
        except NotLoaded:
            return None

    async def parse(self, kind: Kind, data: bytes, client: str) -> GenerationRequest:
        """The generation request of any body, from a worker; raises ApiError. Cancelling ends the work."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._pool.parse(self._job(kind, data), client)
        except TimeoutError:
            raise deadline_passed(self._timeout_s) from None

    def _job(self, kind: Kind, data: bytes) -> ParseJob:
        return ParseJob(kind, data, self._max_model_tokens())
