"""A call's events in their order, of its own stream and of its router's token feed. Pure.

Each event of the stream comes with the number of fed tokens before it, each entry of the feed with the number of events
of the stream before it. Either may arrive first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.request import Token
from headrace.wire.messages import DecodeEvent, Tokens


class FedEvents:
    """Takes both in; `next` gives them back in order."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, DecodeEvent]] = deque()
        self._fed: deque[tuple[int, Sequence[int]]] = deque()
        self._num_events = 0
        self.num_fed = 0
        """Tokens of the feed that `next` has given back."""

    def add_event(self, event: DecodeEvent, fed_before: int) -> None:
        self._events.append((fed_before, event))

    def add_fed(self, token_ids: Sequence[int], events_before: int) -> None:
        self._fed.append((events_before, token_ids))

    @property
    def has_events(self) -> bool:
        """True if events of the stream wait."""
        return bool(self._events)

    def next(self) -> DecodeEvent | None:
        """The event that comes next, with all fed tokens that follow each other; None if it has not arrived."""
        tokens: list[Token] = []
        while self._fed and self._fed[0][0] <= self._num_events:
            tokens += map(Token, self._fed.popleft()[1])
        if tokens:
            self.num_fed += len(tokens)
            return Tokens(tuple(tokens))
        if self._events and self._events[0][0] <= self.num_fed:
            self._num_events += 1
            return self._events.popleft()[1]
        return None
