"""From an HTTP request to its answer: its body read and parsed, its requests run, its client's leaving noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from headrace.tracing import context_of
from headrace.tracing import current as current_trace
from router.api.answer_writer import ANSWER_END, WriterOf
from router.api.asker import asked_by
from router.api.bodies import Bodies
from router.api.clients import client_of
from router.api.completions import CompletionService
from router.api.generation import GenerationRequest
from router.api.request_ids import request_id_of
from router.errors import ApiError
from router.http.body_writer import body_writer_of
from router.parsing.body_parser import Reader
from router.parsing.parser import RequestParser

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
CLIENT_CLOSED_REQUEST = 499  # nginx's number
CLIENT_LEFT = ApiError(HTTPStatus.BAD_REQUEST, "the client left", code="client_left")
T = TypeVar("T")


class ClientLeft(Exception):
    """The client disconnected before the answer was complete."""


class Answering:
    """The work that all routes share which read long bodies or generate."""

    def __init__(self, service: CompletionService, parser: RequestParser, bodies: Bodies) -> None:
        self._service = service
        self._parser = parser
        self._bodies = bodies

    async def generation_body(self, request: Request, read: Reader[T]) -> T:
        """The body of a request that generates, as its reader makes it; raises as `generation_data`, and ClientLeft."""
        async with self.generation_data(request) as data:
            return await self.parsed(request, read, data)

    @asynccontextmanager
    async def generation_data(self, request: Request) -> AsyncIterator[bytes]:
        """The bytes of a body of a request that generates; refused before they are read if the line is full.

        Raises ApiError, starlette's ClientDisconnect.
        """
        request_id_of(request.scope)
        client = client_of(request)
        self._service.check_line(client)
        async with self._bodies.read(request, client.name) as data:
            yield data

    async def body(self, request: Request, read: Reader[T]) -> T:
        """The body of any request, as its reader makes it; raises as `generation_body`."""
        async with self._bodies.read(request, client_of(request).name) as data:
            return await self.parsed(request, read, data)

    def holding(self, request: Request, num_bytes: int) -> AbstractContextManager[None]:
        """Counts bytes that are parsed with the request's body among the bodies; raises as `generation_data`."""
        return self._bodies.held(client_of(request).name, num_bytes)

    async def parsed(self, request: Request, read: Reader[T], data: bytes, before: Sequence[bytes] = ()) -> T:
        """A body that has been received, as its reader makes it; raises as `generation_body`.

        before   what the reader has beside the body, and reads, too
        """
        # FastAPI's own parsing (json.loads, then the model) takes 93 us for a chat of 48 kB, `parse_body` 43: 2,000 and
        # 2,360 requests a second through httpx's ASGI transport. FastAPI's has no limit of length, and blocks the loop.
        parsed = self._parser.parse_at_once(read, data, before)
        if parsed is not None:
            return parsed
        return await unless_gone(request.receive, self._parser.parse(read, data, client_of(request).name))

    async def generate(self, request: Request, generation: GenerationRequest, writer_of: WriterOf) -> Response:
        """The answer to a generation request, whole or as a stream; raises as `generation_body`."""
        current_trace.set(context_of(request.headers))
        client = client_of(request)
        generation = asked_by(client, request_id_of(request.scope), request.scope, generation)
        service = self._service
        deadline_s = asyncio.get_running_loop().time() + service.answer_timeout_s
        if generation.stream:
            answer = service.stream(generation, writer_of, client, body_writer_of(request.scope))
        else:
            answer = service.answer(generation, writer_of, client)
        # Nothing is sent before the answer or its first event is there, so that errors still have a status code.
        first = await unless_gone(request.receive, answer.__anext__())
        if generation.stream:
            return _Answer(first, answer, deadline_s, media_type="text/event-stream", headers=STREAM_HEADERS)
        return _Answer(first, answer, deadline_s, headers={"content-length": str(len(first) + len(ANSWER_END))})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`; cancels it when the client disconnects, and raises ClientLeft."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Answer(StreamingResponse):
    """An answer that is written at its client's pace. Closes its source, which then gives back what it holds, as soon
    as the client has everything, disconnects (also between two events) or has not taken it all until `deadline_s`."""

    media_type = "application/json"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes], deadline_s: float, **kwargs: Any) -> None:
        super().__init__(_chain(first, rest), **kwargs)
        self._rest = rest
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            with suppress(ClientLeft, TimeoutError):
                async with asyncio.timeout_at(self._deadline_s):
                    await unless_gone(receive, self.stream_response(send))


async def _chain(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for data in rest:
        yield data
