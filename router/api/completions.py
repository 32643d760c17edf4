"""Answers orders: runs their requests, turns tokens into text, counts the usage. Knows no web framework."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus

from headrace.wire.messages import Role
from router.api.choices import Choices
from router.api.generation import Order, OrderDesk
from router.api.responses import DONE, Replies, event
from router.api.schemas import ChatBody, CompletionBody, GenerationBody, parse_body
from router.errors import ApiError, overloaded
from router.requests.admission import Admission
from router.requests.dispatch import Dispatcher
from router.text.text_stream import Piece
from router.text.tokens import ModelTokens


class Front:
    """Bodies in, JSON or server-sent events out."""

    def __init__(
        self, model: str, tokens: ModelTokens, desk: OrderDesk, dispatcher: Dispatcher, admission: Admission
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._desk = desk
        self._dispatcher = dispatcher
        self._admission = admission

    def chat(self, data: bytes) -> Order:
        """The order in a chat request's body; raises ApiError."""
        body = parse_body(ChatBody, data)
        self._check_model(body)
        return self._desk.chat(body)

    def completion(self, data: bytes) -> Order:
        """The order in a completion request's body; raises ApiError."""
        body = parse_body(CompletionBody, data)
        self._check_model(body)
        return self._desk.completion(body)

    def _check_model(self, body: GenerationBody) -> None:
        if body.model is not None and body.model != self._model:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"model {body.model!r} is not served here; use {self._model!r}",
                param="model",
                code="model_not_found",
            )

    async def answer(self, order: Order) -> bytes:
        """The whole answer; raises the first ApiError of any choice."""
        pieces: list[list[Piece]] = [[] for _ in order.requests]
        reasons = [""] * len(order.requests)
        async with self._running(order) as choices:
            async for choice, piece, reason in choices.pieces():
                pieces[choice.index].append(piece)
                if reason is not None:
                    reasons[choice.index] = reason.value
            usage = choices.usage()
        return Replies(order, self._tokens.token_bytes).whole(list(zip(pieces, reasons, strict=True)), usage)

    async def stream(self, order: Order) -> AsyncGenerator[bytes]:
        """Server-sent events. An error before the first is raised, a later one is an event, and the last."""
        replies = Replies(order, self._tokens.token_bytes)
        begun: set[int] = set()  # choices of which something was sent
        try:
            async with self._running(order) as choices:
                async for choice, piece, reason in choices.pieces():
                    data = b"" if choice.index in begun else replies.opening(choice.index)
                    data += replies.piece(choice.index, piece)
                    if reason is not None:
                        data += replies.closing(choice.index, reason.value)
                    if data:
                        begun.add(choice.index)
                        yield data
                if order.include_usage:
                    yield replies.usage(choices.usage())
            yield DONE
        except ApiError as error:
            if not begun:
                raise
            yield event(error.json())

    @asynccontextmanager
    async def _running(self, order: Order) -> AsyncIterator[Choices]:
        """Queues an order's requests and runs them; leaving cancels what still runs."""
        # A registered one that was just lost is worth waiting for: it may be back within a heartbeat.
        if not any(node.info.role is Role.DECODE for node in self._dispatcher.nodes.all()):
            raise overloaded("no decode node is registered; see /cluster", retry_after_s=2)
        choices = Choices(order, self._tokens)
        async with AsyncExitStack() as stack:
            tickets = self._admission.line_up(len(order.requests))
            for ticket in tickets:
                stack.callback(ticket.drop)
            for choice, ticket in zip(choices.all, tickets, strict=True):
                run = self._dispatcher.run(choice.request, ticket, choices.inbox(choice.index))
                choices.runs.append(await stack.enter_async_context(run))
            yield choices
