"""Where a part goes: to the session that expects its nonce, or nowhere. The one rule, for every transport.

Not by its index, its sender or its size: two sessions of one node plan messages that differ in nothing else.
"""

from typing import Generic, TypeVar

from transfer.protocol.envelope import Tag
from transfer.protocol.errors import IllegalTransition

Destination = TypeVar("Destination")


class Routes(Generic[Destination]):
    """Sessions by their nonce; a session that has ended is in it no more, so that what comes late finds nobody."""

    def __init__(self) -> None:
        self._expecting: dict[int, Destination] = {}

    def expect(self, nonce: int, destination: Destination) -> None:
        """Raises `IllegalTransition` when this nonce is expected already."""
        if nonce in self._expecting:
            raise IllegalTransition(f"nonce {nonce:#x} is expected already: issue a fresh one for each attempt")
        self._expecting[nonce] = destination

    def forget(self, nonce: int) -> None:
        """Nobody expects it from now on; it need not have been expected."""
        self._expecting.pop(nonce, None)

    def destination(self, tag: Tag) -> Destination | None:
        """Who is to have a part with this tag; None: drop it."""
        return self._expecting.get(tag.nonce)

    def __len__(self) -> int:
        return len(self._expecting)
