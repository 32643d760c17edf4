"""Unread output of one client: of all its choices, bounded in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class OutputQueue(Generic[T]):
    """Outputs of several requests for one reader, each with its choice's index.

    The reader takes all that have gathered at once: a slow client gets longer deltas, not more of them. Above
    `max_bytes` the requests' drivers wait in `room` before they read more from their nodes. Nothing is refused: what a
    driver has read already must be kept, so that the queue holds at most one output of each choice more.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: list[tuple[int, T]] = []
        self._filled = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._reader_waits = False
        self.num_bytes = 0

    @property
    def is_awaited(self) -> bool:
        """True while the reader waits, and has passed on all that was put here: what comes now may pass by."""
        return self._reader_waits and not self._items

    def put(self, index: int, output: T, num_bytes: int) -> None:
        self._items.append((index, output))
        self._filled.set()
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes:
            self._has_room.clear()

    @property
    def has_room(self) -> bool:
        return self._has_room.is_set()

    async def room(self) -> None:
        """Waits until the reader has taken what is here, if that is too much."""
        await self._has_room.wait()

    async def batches(self) -> AsyncIterator[list[tuple[int, T]]]:
        """Non-empty lists of outputs, in order, without end."""
        while True:
            self._reader_waits = True
            try:
                await self._filled.wait()
            finally:
                self._reader_waits = False
            self._filled.clear()
            items, self._items = self._items, []
            self.num_bytes = 0
            self._has_room.set()
            yield items
