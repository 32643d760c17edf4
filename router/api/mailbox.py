"""From the tasks that drive requests to the one that answers the client: everything waiting at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any writers, one reader. The reader gets all that has gathered, so a slow client gets larger chunks."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._news = asyncio.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._news.set()

    async def batches(self) -> AsyncIterator[list[T]]:
        """Non-empty lists, in order, for as long as the reader wants."""
        while True:
            await self._news.wait()
            self._news.clear()
            items, self._items = self._items, []
            yield items
