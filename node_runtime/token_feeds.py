"""Tokens of all requests of one router on their way to it in one stream.

A message for each request and step would take most of the event loop's time, and of the interpreter's lock, which the
engine's thread needs. A call that names a feed puts its plain tokens there, and one message takes what all calls have
put since the one before. All else goes by the call's own stream. Each side of the two says how much of the other went
before, so that the router restores the order (`headrace/wire/fed_events.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

from headrace.request import Token
from headrace.wire.messages import Tokens

MAX_UNREAD = 256
"""Tokens of a call that its router has not read yet; the others go by the call's own stream, where gRPC makes a node
wait for a router that reads nothing."""

FedBatch = dict[tuple[int, int], list[int]]
"""Token ids by call and by the number of events in its own stream before them, in order."""


class TokenFeed:
    """One router's feed. It is open as long as its stream is, and until the node begins to stop."""

    def __init__(self) -> None:
        self.is_open = True
        self._waiting: FedBatch = {}
        self._news = asyncio.Event()

    def put(self, call: int, events_before: int, token_ids: list[int]) -> None:
        """Adds tokens of a call; the feed must be open."""
        self._waiting.setdefault((call, events_before), []).extend(token_ids)
        self._news.set()

    def close(self) -> None:
        """Takes no more tokens; `batches` ends with those that it has."""
        self.is_open = False
        self._news.set()

    async def batches(self) -> AsyncGenerator[FedBatch, None]:
        """Yields what was put, each time all of it."""
        while self.is_open or self._waiting:
            await self._news.wait()
            self._news.clear()
            batch, self._waiting = self._waiting, {}
            if batch:
                yield batch


class TokenFeeds:
    """A node's open feeds, by the numbers that their routers have drawn."""

    def __init__(self) -> None:
        self._open: dict[int, TokenFeed] = {}
        self._is_closed = False

    @contextmanager
    def opened(self, number: int) -> Iterator[TokenFeed]:
        """A feed for as long as the block runs."""
        feed = self._open[number] = TokenFeed()
        if self._is_closed:
            feed.close()
        try:
            yield feed
        finally:
            feed.is_open = False
            if self._open.get(number) is feed:
                del self._open[number]

    def get(self, number: int) -> TokenFeed | None:
        return self._open.get(number)

    def close(self) -> None:
        """Ends all feeds once they are empty: from now on tokens go by their calls' own streams."""
        self._is_closed = True
        for feed in self._open.values():
            feed.close()


class FedCall:
    """Which of a call's events go by its feed.

    name   the feed and the call there, as the call's metadata has them; None: all events go by the call's own stream
    """

    def __init__(self, feeds: TokenFeeds, name: tuple[int, int] | None) -> None:
        self._feeds = feeds
        self._name = name
        self._unread = 0
        self.num_fed = 0
        self.num_events = 0
        """In the call's own stream; counted by its owner."""

    def put(self, tokens: Tokens) -> bool:
        """Puts plain tokens into the feed; False if these must go by the call's own stream."""
        return tokens.finish is None and self.put_plain(tokens.tokens)

    def put_plain(self, tokens: Sequence[Token]) -> bool:
        """As `put`, for tokens behind which the answer goes on."""
        if self._name is None or self._unread >= MAX_UNREAD:
            return False
        number, call = self._name
        feed = self._feeds.get(number)
        if feed is None or not feed.is_open or any(token.logprobs is not None for token in tokens):
            return False
        feed.put(call, self.num_events, [token.id for token in tokens])
        self.num_fed += len(tokens)
        self._unread += len(tokens)
        return True

    def read(self, num_tokens: int) -> None:
        """The router has read so many tokens of the feed."""
        self._unread -= num_tokens


UNFED = FedCall(TokenFeeds(), None)
"""A call all of whose events go by its own stream."""
