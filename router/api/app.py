"""The router's HTTP application: routes, bodies, status codes, disconnects. With `openapi`, all that knows FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.bodies import Bodies
from router.api.chat_schemas import ChatBody
from router.api.clients import client_of
from router.api.completion_schemas import CompletionBody
from router.api.completions import CompletionService
from router.api.openapi import errors, generation_route, openapi_document
from router.api.operator import add_operator_routes
from router.api.request_ids import IdentifiedApp, identified, request_id_of
from router.api.response_counts import CountedApp, CountResponse, note_error
from router.api.response_schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    Cluster,
    Completion,
    CompletionChunk,
    Explanation,
    Health,
    Model,
    ModelList,
    Readiness,
)
from router.api.responses import ANSWER_END
from router.cluster.role_switch import RoleSwitch
from router.errors import ApiError, internal_error
from router.http.limits import HttpLimits
from router.parsing.body_parser import Kind
from router.parsing.parser import RequestParser
from router.requests.drains import Drains
from router.status import ClusterStatus

STATIC = Path(__file__).parent / "static"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
CLIENT_CLOSED_REQUEST = 499  # nginx's number
CLIENT_LEFT = ApiError(HTTPStatus.BAD_REQUEST, "the client left", code="client_left")
T = TypeVar("T")


def build_app(
    service: CompletionService,
    parser: RequestParser,
    status: ClusterStatus,
    roles: RoleSwitch,
    drains: Drains,
    limits: HttpLimits,
    count_response: CountResponse,
) -> ASGIApp:
    """The ASGI application. Answers go out as they were written: `response_model`s are documentation."""
    bodies = Bodies(limits)
    app = FastAPI(title="Headrace", version="1", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unforeseen_error)
    app.add_exception_handler(_ClientLeft, _on_client_left)
    app.add_exception_handler(ClientDisconnect, _on_client_left)  # during the upload

    async def respond(request: Request, kind: Kind) -> Response:
        request_id = request_id_of(request.scope)
        # FastAPI's own parsing (json.loads, then the model) takes 93 us for a chat of 48 kB, `parse_body` 43: 2,000 and
        # 2,360 requests a second through httpx's ASGI transport. FastAPI's has no limit of length, and blocks the loop.
        client = client_of(request, limits.client_header)
        service.check_line(client)
        async with bodies.read(request, client) as data:
            generation = parser.parse_at_once(kind, data)
            if generation is None:
                generation = await _unless_gone(request.receive, parser.parse(kind, data, client))
        generation = identified(generation, request_id)
        deadline_s = asyncio.get_running_loop().time() + service.answer_timeout_s
        answer = (service.stream if generation.stream else service.answer)(generation, client)
        # Nothing is sent before the answer or its first event is there, so that errors still have a status code.
        first = await _unless_gone(request.receive, answer.__anext__())
        if generation.stream:
            return _Answer(first, answer, deadline_s, media_type="text/event-stream", headers=STREAM_HEADERS)
        return _Answer(first, answer, deadline_s, headers={"content-length": str(len(first) + len(ANSWER_END))})

    @app.post("/v1/chat/completions", **generation_route(ChatBody, ChatCompletion, ChatCompletionChunk))
    async def chat(request: Request) -> Response:
        """Answers a chat, whole or as a stream."""
        return await respond(request, "chat")

    @app.post("/v1/completions", **generation_route(CompletionBody, Completion, CompletionChunk))
    async def completions(request: Request) -> Response:
        """Continues prompts, whole or as a stream."""
        return await respond(request, "completion")

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        """Lists the served model."""
        return JSONResponse({"object": "list", "data": [status.model()]})

    @app.get("/v1/models/{name:path}", response_model=Model, responses=errors([HTTPStatus.NOT_FOUND]))
    async def model(name: str) -> Response:
        """Describes the served model."""
        return JSONResponse(status.model(name))

    @app.get("/health", response_model=Health)
    async def health() -> Response:
        """Answers as long as the router's process does."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", response_model=Readiness, responses=errors([HTTPStatus.SERVICE_UNAVAILABLE]))
    async def ready() -> Response:
        """Answers with success once a decode node is registered."""
        status.check_ready()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {METRICS_TYPE: {}}}})
    async def metrics() -> Response:
        """Metrics of the router and of all nodes, for Prometheus."""
        return Response(status.metrics(), media_type=METRICS_TYPE)

    @app.get("/cluster", response_model=Cluster)
    async def cluster() -> Response:
        """Nodes, links, requests and cache hits as the router knows them."""
        return JSONResponse(status.cluster())

    @app.get(
        "/cluster/requests/{request_id}/explain",
        response_model=Explanation,
        responses=errors([HTTPStatus.NOT_FOUND], {HTTPStatus.NOT_FOUND: "No routing decision about it is known."}),
    )
    async def explain(request_id: str) -> Response:
        """Says why a request, or each of its choices, went where it went."""
        return JSONResponse(status.explain(request_id))

    add_operator_routes(app, roles, drains, bodies, limits)

    @cache
    def document() -> dict[str, Any]:
        return openapi_document(app)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(document())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(STATIC / "docs.html", media_type="text/html")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    return IdentifiedApp(CountedApp(app, count_response))


class _ClientLeft(Exception):
    """The client disconnected before the answer was complete."""


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`; cancels it when the client disconnects, and raises _ClientLeft."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _ClientLeft
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
            with suppress(_ClientLeft, TimeoutError):
                async with asyncio.timeout_at(self._deadline_s):
                    await _unless_gone(receive, self.stream_response(send))


async def _chain(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for data in rest:
        yield data


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    note_error(request.scope, error)
    return Response(error.json(), error.status, error.headers, media_type="application/json")


async def _on_unforeseen_error(request: Request, error: Exception) -> Response:
    """A defect of the router; the server logs its traceback."""
    return await _on_api_error(request, internal_error())


async def _on_client_left(request: Request, error: Exception) -> Response:
    """Ends the handler; the response goes nowhere, but is counted."""
    note_error(request.scope, CLIENT_LEFT)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals, for unknown paths and wrong methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = await _on_api_error(request, ApiError(status, message, code=status.name.lower()))
    answer.headers.update(error.headers or {})
    return answer
