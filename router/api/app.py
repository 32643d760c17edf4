"""The HTTP front. The only file that knows FastAPI: routes, bodies, status codes, disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from router.api.completions import CompletionService
from router.api.generation import GenerationRequest
from router.errors import ApiError
from router.status import ClusterStatus

PAGE = Path(__file__).parent / "static" / "index.html"
LARGE_BODY_BYTES = 64 << 10  # beyond this, parsing and tokenizing leave the event loop
CLIENT_CLOSED_REQUEST = 499  # nginx's number
T = TypeVar("T")


def build_app(service: CompletionService, status: ClusterStatus, max_body_bytes: int) -> FastAPI:
    """The ASGI application over what the router is made of."""
    app = FastAPI(title="Headrace", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(_ClientLeft, _on_client_left)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _respond(request, service, service.chat, max_body_bytes)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _respond(request, service, service.completion, max_body_bytes)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [status.model()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(status.model(name))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        status.check_ready()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(status.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/cluster")
    async def cluster() -> Response:
        return JSONResponse(status.cluster())

    @app.get("/")
    async def page() -> Response:
        return FileResponse(PAGE, media_type="text/html")

    return app


async def _respond(
    request: Request, service: CompletionService, parse: Callable[[bytes], GenerationRequest], max_body_bytes: int
) -> Response:
    data = await _read_body(request, max_body_bytes)
    generation = parse(data) if len(data) < LARGE_BODY_BYTES else await asyncio.to_thread(parse, data)
    if not generation.stream:
        answer = await _unless_gone(request.receive, service.answer(generation))
        return Response(answer, media_type="application/json")
    events = service.stream(generation)
    # Nothing is sent before the first event, so that its errors still have a status code.
    first = await _unless_gone(request.receive, events.__anext__())
    return _EventStream(first, events)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; 413 as soon as it is too long, whatever Content-Length said."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has more than {max_bytes} bytes (max_body_bytes)",
                code="body_too_large",
            )
    return bytes(data)


class _ClientLeft(Exception):
    """Nobody reads the answer any more."""


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


class _EventStream(Response):
    """Server-sent events; closes their source as soon as the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            with suppress(_ClientLeft):
                await _unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for data in self._rest:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return Response(error.json(), error.status, headers, media_type="application/json")


async def _on_client_left(request: Request, error: Exception) -> Response:
    """Ends the handler; nobody reads this."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = await _on_api_error(request, ApiError(status, message, code=status.name.lower()))
    answer.headers.update(error.headers or {})
    return answer
