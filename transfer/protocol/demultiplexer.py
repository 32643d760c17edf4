"""Routing of arriving parts, the same for every transport: by its nonce a part reaches one session, or none.

Its index, sender and size play no role: two sessions of one node may plan messages that differ in nothing else.
"""

from typing import Generic, TypeVar

from transfer.protocol.envelope import Tag
from transfer.protocol.errors import IllegalTransition

Destination = TypeVar("Destination")


class Demultiplexer(Generic[Destination]):
    """Destinations by nonce. An ended session is removed, so that its late parts have no destination."""

    def __init__(self) -> None:
        self._expecting: dict[int, Destination] = {}

    def expect(self, nonce: int, destination: Destination) -> None:
        """Raises `IllegalTransition` when this nonce is expected already."""
        if nonce in self._expecting:
            raise IllegalTransition(f"nonce {nonce:#x} is expected already: issue a fresh one for each attempt")
        self._expecting[nonce] = destination

    def forget(self, nonce: int) -> None:
        """Removes the nonce's destination, if it has one."""
        self._expecting.pop(nonce, None)

    def destination(self, tag: Tag) -> Destination | None:
        """The destination of a part with this tag; None: drop the part."""
        return self._expecting.get(tag.nonce)

    def __len__(self) -> int:
        return len(self._expecting)
