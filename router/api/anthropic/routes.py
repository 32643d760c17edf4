"""Anthropic's Messages API: POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from router.api.answering import Answering
from router.api.anthropic.chats import read_count, read_messages
from router.api.anthropic.message_responses import Message, MessageErrorBody, MessageEvent, TokenCount
from router.api.anthropic.message_schemas import CountBody, MessagesBody
from router.api.anthropic.message_writer import MessageWriter
from router.api.openapi import event_stream, generation_route, parsing_route
from router.errors import bad_request

PATH = "/v1/messages"
OLD_VERSION = "2023-01-01"  # its events have other names and repeat the text


def add_message_routes(app: FastAPI, answering: Answering) -> None:
    events = event_stream(MessageEvent, MessageErrorBody, named=True, done=False)

    @app.post(PATH, **generation_route(MessagesBody, Message, events, MessageErrorBody))
    async def messages(request: Request) -> Response:
        """Answers a chat in Anthropic's shape, whole or as a stream."""
        _check_version(request)
        generation = await answering.generation_body(request, read_messages)
        return await answering.generate(request, generation, MessageWriter)

    @app.post(f"{PATH}/count_tokens", **parsing_route(CountBody, TokenCount, MessageErrorBody))
    async def count_tokens(request: Request) -> Response:
        """Counts the tokens of a chat's prompt."""
        _check_version(request)
        return Response(await answering.body(request, read_count), media_type="application/json")


def _check_version(request: Request) -> None:
    if request.headers.get("anthropic-version") == OLD_VERSION:
        raise bad_request(f"anthropic-version {OLD_VERSION}: use 2023-06-01 or a later one", "anthropic-version")
