"""A queue of one reader that may look before it takes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")
Kind = TypeVar("Kind")


class Inbox(Generic[Item]):
    """Belongs to one event loop; `get` has one waiter at the most."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._arrived = asyncio.Event()

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._arrived.set()

    async def get(self) -> Item:
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()

    def take_if(self, kind: type[Kind]) -> Kind | None:
        """The next item if it is there and of this kind."""
        if self._items and isinstance(self._items[0], kind):
            item = self._items.popleft()
            assert isinstance(item, kind)
            return item
        return None
