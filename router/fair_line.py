"""A waiting line that clients share fairly, whoever sends most. Pure.

Start-time fair queueing (Goyal, Vin and Cheng 1996): each item is tagged with the work that its client has asked for
before it, and the smallest tag goes first. A client alone gets everything; beside others each gets an equal share of
the work, counted in the items' costs, and a client that comes back after a pause begins where the line is. Once nobody
waits, all begin anew.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from itertools import count
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class _Place(NamedTuple):
    """`arrival` decides among equal tags; `next_tag` is that of what the client asks for next."""

    tag: float
    arrival: int
    client: str
    next_tag: float


class FairLine(Generic[Item]):
    """Items are hashable and wait once each."""

    def __init__(self) -> None:
        self._places: dict[Item, _Place] = {}
        self._asked: dict[str, float] = {}  # by client: the tag of what it asks for next
        self._now = 0.0  # the tag of the last item that was taken
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._places)

    def join(self, client: str, item: Item, cost: float) -> None:
        """Adds an item of a client; `cost` is the work that it asks for, in any one unit."""
        tag = self._next_tag(client)
        self._places[item] = _Place(tag, next(self._arrivals), client, tag + cost)
        self._asked[client] = tag + cost

    def leave(self, item: Item) -> None:
        """Takes out an item. Its client has not asked for it, unless it has asked for more since."""
        place = self._places.pop(item)
        if self._asked.get(place.client) == place.next_tag:
            self._asked[place.client] = place.tag
        self._forget_served()

    def take(self, may_go: Callable[[Item], bool]) -> Item | None:
        """Takes out the next item of those that may go; None if there is none."""
        places = self._places
        item = min(filter(may_go, places), key=places.__getitem__, default=None)
        if item is not None:
            self._now = max(self._now, places.pop(item).tag)
            self._forget_served()
        return item

    def position(self, client: str) -> int:
        """How many items would go before a new one of this client."""
        next_tag = self._next_tag(client)
        return sum(place.tag <= next_tag for place in self._places.values())

    def last(self, number: int) -> list[Item]:
        """The items that would go last: of the clients that ask for the most."""
        return nlargest(number, self._places, key=self._places.__getitem__)

    def _forget_served(self) -> None:
        self._asked = {client: tag for client, tag in self._asked.items() if self._places and tag > self._now}

    def _next_tag(self, client: str) -> float:
        return max(self._now, self._asked.get(client, 0.0))
