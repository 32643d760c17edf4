"""Running requests whose router was lost: kept for a while, for another router that is asked for the same answer.

A request gets here only if its client chose its id (`Request.is_resumable`): nobody else could ask for it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from headrace.request import FinishReason, Request, Token
from headrace.wire.messages import Tokens

log = logging.getLogger(__name__)

MAX_ORPHANS = 256
"""Kept at a time; their ids travel in every heartbeat."""


class AnswerSoFar:
    """The tokens that answer a resumable request, from the first one on. Pure."""

    def __init__(self, request: Request) -> None:
        self.request = request
        # Those that another node generated before a migration are part of the request.
        self._tokens = [Token(token_id) for token_id in request.tokens[request.num_prompt_tokens :]]
        self._finish: FinishReason | None = None

    def add(self, tokens: Tokens) -> None:
        """Adds what the router gets; of a request that is not resumable nothing is kept."""
        if self.request.is_resumable:
            self._tokens.extend(tokens.tokens)
            self._finish = tokens.finish

    @property
    def is_whole(self) -> bool:
        """True if all is here that a client has asked for. Log-probabilities of a token that another node has drawn are
        not: of one that came with a transfer, they went to the lost router alone."""
        return self.request.sampling.logprobs is None or all(token.logprobs is not None for token in self._tokens)

    def fits(self, request: Request) -> bool:
        """True if it answers that request, too, and if the tokens that its client has seen are the first of these.

        The salt is part of it: another tenant's request with the same id is another request.
        """
        length = request.num_prompt_tokens
        shown = request.tokens[length:]
        return (
            self.request.num_prompt_tokens == length
            and self.request.salt == request.salt
            and self.request.sampling == request.sampling
            and self.request.tokens[:length] == request.tokens[:length]
            and [token.id for token in self._tokens[: len(shown)]] == list(shown)
        )

    def beyond(self, request: Request) -> Tokens:
        """The tokens that this request's client has not seen."""
        num_shown = len(request.tokens) - request.num_prompt_tokens
        return Tokens(tuple(self._tokens[num_shown:]), self._finish)


class Orphan(Protocol):
    """A request that goes on without a call."""

    @property
    def request(self) -> Request: ...
    def continues(self, request: Request) -> bool: ...
    async def give_up(self) -> None: ...


Kept = TypeVar("Kept", bound=Orphan)


class Orphans(Generic[Kept]):
    """Requests without a router, by id; each is given up after `timeout_s`. `changed` is called after each change."""

    def __init__(self, timeout_s: float, changed: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._changed = changed
        self._kept: dict[str, tuple[Kept, asyncio.Task[None]]] = {}
        self._is_closed = False
        self.num_kept = 0
        self.num_adopted = 0

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._kept)

    def keep(self, orphan: Kept) -> bool:
        """Takes a request over; False: there is no room for it, or the node stops."""
        request_id = orphan.request.request_id
        if self._is_closed or len(self._kept) >= MAX_ORPHANS or request_id in self._kept:
            return False
        self._kept[request_id] = (orphan, asyncio.create_task(self._expire(request_id)))
        self.num_kept += 1
        self._changed()
        return True

    def take(self, request: Request) -> Kept | None:
        """The orphan that this request continues; whoever takes it must end it."""
        orphan, expiry = self._kept.get(request.request_id, (None, None))
        if orphan is None or expiry is None or not orphan.continues(request):
            return None
        expiry.cancel()
        del self._kept[request.request_id]
        self.num_adopted += 1
        self._changed()
        return orphan

    async def abandon(self, request_ids: Sequence[str]) -> None:
        """Gives up those that are kept. Logs them: the node had taken their router for lost."""
        for request_id in request_ids:
            if request_id in self._kept:
                log.info("request %s: its router is not lost, and needs it here no longer", request_id)
                self._kept[request_id][1].cancel()
                await self._give_up(request_id)

    async def close(self) -> None:
        """Gives up every request, and keeps no more."""
        self._is_closed = True
        kept, self._kept = list(self._kept.values()), {}
        for _, expiry in kept:
            expiry.cancel()
        await asyncio.gather(*(orphan.give_up() for orphan, _ in kept))

    async def _expire(self, request_id: str) -> None:
        await asyncio.sleep(self._timeout_s)
        await self._give_up(request_id)

    async def _give_up(self, request_id: str) -> None:
        orphan, _ = self._kept.pop(request_id)
        self._changed()
        await orphan.give_up()
