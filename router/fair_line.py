"""A waiting line that clients share fairly, whoever sends most. Pure.

Start-time fair queueing (Goyal, Vin and Cheng 1996): each item is tagged with the work that its client has asked for
before it, and the smallest tag goes first. A client alone gets everything; beside others each gets an equal share of
the work, counted in the items' costs, and a client that comes back after a pause begins where the line is. Once nobody
waits, all begin anew. A cost may turn out to be another once the work is done: `correct` makes up for it, as in the
Virtual Token Counter (Sheng et al. 2024). Among items of different priority the lowest number goes first, whatever the
clients have had.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import count
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class _Place(NamedTuple):
    """`arrival` decides among equals, and is unlike any other place's."""

    priority: int
    arrival: int
    cost: float


class _Turn(NamedTuple):
    """When an item goes: the smallest turn first."""

    priority: int
    tag: float
    arrival: int


@dataclass
class _Client:
    """`tag` of its next item; `places` of its items in the order in which they go."""

    tag: float
    places: list[_Place] = field(default_factory=list)

    def turns(self) -> Iterator[_Turn]:
        tag = self.tag
        for place in self.places:
            yield _Turn(place.priority, tag, place.arrival)
            tag += place.cost


class FairLine(Generic[Item]):
    """Items are hashable and wait once each."""

    def __init__(self) -> None:
        self._items: dict[int, Item] = {}  # by arrival
        self._places: dict[Item, tuple[str, _Place]] = {}
        self._clients: dict[str, _Client] = {}
        self._now = 0.0  # the tag of the last item that was taken
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._places)

    def join(self, client: str, item: Item, cost: float, priority: int = 0) -> None:
        """Adds an item of a client; `cost` is the work that it asks for, in any one unit."""
        place = _Place(priority, next(self._arrivals), cost)
        insort(self._at(client).places, place)
        self._items[place.arrival] = item
        self._places[item] = (client, place)

    def leave(self, item: Item) -> None:
        """Takes out an item: its client has not asked for it."""
        client, place = self._places.pop(item)
        self._clients[client].places.remove(place)
        del self._items[place.arrival]
        self._forget_served()

    def take(self, may_go: Callable[[Item], bool]) -> Item | None:
        """Takes out the next item of those that may go; None if there is none."""
        turn = min((turn for turn in self._turns() if may_go(self._items[turn.arrival])), default=None)
        if turn is None:
            return None
        item = self._items.pop(turn.arrival)
        name, place = self._places.pop(item)
        client = self._clients[name]
        client.places.remove(place)
        client.tag += place.cost
        self._now = max(self._now, turn.tag)
        self._forget_served()
        return item

    def correct(self, client: str, cost: float) -> None:
        """Adds to what a client has had: an item of it that was taken has cost so much more, or less, than it said."""
        if self._places:
            self._at(client).tag += cost
            self._forget_served()

    def position(self, client: str, priority: int = 0) -> int:
        """How many items would go before a new one of this client."""
        known = self._clients.get(client)
        tag = self._now if known is None else max(self._now, known.tag)
        for place in () if known is None else known.places:
            if place.priority <= priority:
                tag += place.cost
        return sum((turn.priority, turn.tag) <= (priority, tag) for turn in self._turns())

    def last(self, number: int) -> list[Item]:
        """The items that would go last: of the clients that ask for the most."""
        return [self._items[turn.arrival] for turn in nlargest(number, self._turns())]

    def _turns(self) -> Iterator[_Turn]:
        for client in self._clients.values():
            yield from client.turns()

    def _at(self, client: str) -> _Client:
        """The client; one that has nothing in the line begins where the line is."""
        known = self._clients.setdefault(client, _Client(self._now))
        if not known.places:
            known.tag = max(known.tag, self._now)
        return known

    def _forget_served(self) -> None:
        if not self._places:
            self._clients = {}
        else:
            self._clients = {
                name: client for name, client in self._clients.items() if client.places or client.tag > self._now
            }
