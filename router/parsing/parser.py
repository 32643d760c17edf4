"""The two places where bodies are parsed: small ones on the event loop at once, all others in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from router.errors import deadline_passed
from router.parsing.body_parser import BodyParser, ParseJob, Reader
from router.parsing.pool import WorkerPool
from router.text.literal_tokens import NotLoaded

T = TypeVar("T")

SMALL_BODY_BYTES = 4 << 10
"""Parsed on the loop: 2 ms at the most, where a worker and its pipe would add half a millisecond to every chat."""


SMALL_BODY_OBJECTS = 24
"""Each message is an object, and costs the template time even if it is empty."""


class RequestParser:
    """Reads bodies, each with its route's reader. `max_model_tokens` returns the nodes' limit, None without nodes."""

    def __init__(
        self, here: BodyParser, pool: WorkerPool, max_model_tokens: Callable[[], int | None], timeout_s: float
    ) -> None:
        self._here = here
        self._pool = pool
        self._max_model_tokens = max_model_tokens
        self._timeout_s = timeout_s

    def parse_at_once(self, read: Reader[T], data: bytes, before: Sequence[bytes] = ()) -> T | None:
        """A small body as its reader makes it, or None if it is one for a worker; raises ApiError.

        before   what the reader has beside the body, and reads, too
        """
        parts = (data, *before)
        if sum(map(len, parts)) > SMALL_BODY_BYTES or sum(each.count(b"{") for each in parts) > SMALL_BODY_OBJECTS:
            return None
        try:
            return self._here.parse(self._job(read, data))
        except NotLoaded:
            return None

    async def parse(self, read: Reader[T], data: bytes, client: str) -> T:
        """Any body as its reader makes it, from a worker; raises ApiError. Cancelling ends the work."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._pool.parse(self._job(read, data), client)
        except TimeoutError:
            raise deadline_passed(self._timeout_s) from None

    def _job(self, read: Reader[T], data: bytes) -> ParseJob[T]:
        return ParseJob(read, data, self._max_model_tokens())
