"""The router's HTTP application: routes, bodies, status codes, disconnects. With `openapi`, all that knows FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp

from router.api.answering import CLIENT_CLOSED_REQUEST, CLIENT_LEFT, Answering, ClientLeft
from router.api.anthropic.message_responses import MessageEvent
from router.api.anthropic.message_schemas import CountBody, MessagesBody
from router.api.anthropic.routes import add_message_routes
from router.api.bodies import Bodies
from router.api.chat_response_schemas import ChatCompletion, ChatCompletionChunk
from router.api.chat_schemas import ChatBody
from router.api.chat_writer import ChatWriter
from router.api.clients import Clients, note_client
from router.api.cluster_response_schemas import Cluster, Explanation
from router.api.completion_response_schemas import Completion, CompletionChunk
from router.api.completion_schemas import CompletionBody
from router.api.completion_writer import CompletionWriter
from router.api.completions import CompletionService
from router.api.error_shapes import error_json
from router.api.head_requests import HeadApp
from router.api.openapi import errors, event_stream, generation_route, openapi_document
from router.api.operator import add_operator_routes
from router.api.operator_schemas import DrainBody, RoleBody
from router.api.readers import read_chat, read_completion
from router.api.request_ids import HEADER, IdentifiedApp
from router.api.response_counts import CountedApp, CountResponse, note_error
from router.api.response_schemas import ErrorBody, Health, Model, ModelList, Readiness, Version
from router.api.responses_api.response_bodies import ResponsesBody
from router.api.responses_api.response_schemas import ResponseEvent
from router.api.responses_api.routes import add_response_routes
from router.api.responses_api.stored_responses import StoredResponses
from router.api.shared_page import SharedPage
from router.api.tokenizing import DetokenizeBody, TokenizeBody, add_tokenizer_routes
from router.api.unserved_paths import NO_SUCH_PATH, NO_WEBSOCKETS, why_unserved
from router.cluster.role_switch import RoleSwitch
from router.errors import ApiError, internal_error
from router.http.limits import HttpLimits
from router.parsing.parser import RequestParser
from router.requests.drains import Drains
from router.status import ClusterStatus

STATIC = Path(__file__).parent / "static"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
}
JSON_TYPE = "application/json"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BODIES = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    MessagesBody,
    CountBody,
    TokenizeBody,
    DetokenizeBody,
    RoleBody,
    DrainBody,
)
CHUNKS = (ChatCompletionChunk, CompletionChunk, ResponseEvent, MessageEvent)


def build_app(
    service: CompletionService,
    parser: RequestParser,
    status: ClusterStatus,
    roles: RoleSwitch,
    drains: Drains,
    clients: Clients,
    limits: HttpLimits,
    stored: StoredResponses,
    count_response: CountResponse,
) -> ASGIApp:
    """The ASGI application. Answers go out as they were written: `response_model`s are documentation."""

    class KeyedRoute(APIRoute):
        """A route whose requests all come from a known client. FastAPI's dependencies cost a small chat 2 % more."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()

            async def checked(request: Request) -> Response:
                note_client(request, clients.of(request))
                return await answer(request)

            return checked

    bodies = Bodies(limits)
    app = FastAPI(title="Headrace", version="1", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.route_class = KeyedRoute  # of all routes, those that are added later too: none is open by mistake
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unforeseen_error)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(ClientDisconnect, _on_client_left)  # during the upload

    answering = Answering(service, parser, bodies)
    metrics_page = SharedPage(status.metrics)
    cluster_page = SharedPage(lambda: bytes(JSONResponse(status.cluster()).body))

    chat_events = event_stream(ChatCompletionChunk, ErrorBody)
    completion_events = event_stream(CompletionChunk, ErrorBody)

    @app.post("/v1/chat/completions", **generation_route(ChatBody, ChatCompletion, chat_events))
    async def chat(request: Request) -> Response:
        """Answers a chat, whole or as a stream."""
        generation = await answering.generation_body(request, read_chat)
        return await answering.generate(request, generation, ChatWriter)

    @app.post("/v1/completions", **generation_route(CompletionBody, Completion, completion_events))
    async def completions(request: Request) -> Response:
        """Continues prompts, whole or as a stream."""
        generation = await answering.generation_body(request, read_completion)
        return await answering.generate(request, generation, CompletionWriter)

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

    @app.get("/version", response_model=Version)
    async def release() -> Response:
        """The release that serves."""
        return JSONResponse({"version": version("headrace")})

    @app.get("/ready", response_model=Readiness, responses=errors([HTTPStatus.SERVICE_UNAVAILABLE]))
    async def ready() -> Response:
        """Answers with success once a node that generates answers is registered."""
        status.check_ready()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {METRICS_TYPE: {}}}})
    async def metrics() -> Response:
        """Metrics of the router and of all nodes, for Prometheus."""
        return Response(await metrics_page.get(), media_type=METRICS_TYPE)

    @app.get("/cluster", response_model=Cluster)
    async def cluster() -> Response:
        """Nodes, links, requests and cache hits as the router knows them."""
        return Response(await cluster_page.get(), media_type=JSON_TYPE)

    @app.get(
        "/cluster/requests/{request_id}/explain",
        response_model=Explanation,
        responses=errors([HTTPStatus.NOT_FOUND], {HTTPStatus.NOT_FOUND: "No routing decision about it is known."}),
    )
    async def explain(request_id: str) -> Response:
        """Says why a request, or each of its choices, went where it went."""
        return JSONResponse(status.explain(request_id))

    add_response_routes(app, answering, stored)
    add_message_routes(app, answering)
    add_tokenizer_routes(app, answering)
    add_operator_routes(app, roles, drains, bodies)

    @cache
    def document() -> bytes:
        return bytes(JSONResponse(openapi_document(app, BODIES, CHUNKS)).body)

    documented = asyncio.Lock()

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        async with documented:  # the first takes 0.2 s, in a thread, and is the only one that does
            return Response(await asyncio.to_thread(document), media_type=JSON_TYPE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(STATIC / "docs.html", media_type="text/html")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html", headers=PAGE_HEADERS)

    @app.get("/static/page.js", include_in_schema=False)
    async def script() -> Response:
        return FileResponse(STATIC / "page.js", media_type="text/javascript")

    @app.get("/static/page.css", include_in_schema=False)
    async def style() -> Response:
        return FileResponse(STATIC / "page.css", media_type="text/css")

    identified: ASGIApp = HeadApp(IdentifiedApp(CountedApp(app, count_response)))
    if not limits.cors_origins:
        return identified
    return CORSMiddleware(  # outermost: it answers preflights, which carry no key
        identified,
        allow_origins=limits.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=(HEADER, "retry-after"),
    )


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    note_error(request.scope, error)
    return Response(error_json(request.url.path, error), error.status, error.headers, media_type="application/json")


async def _on_unforeseen_error(request: Request, error: Exception) -> Response:
    """A defect of the router; the server logs its traceback."""
    return await _on_api_error(request, internal_error())


async def _on_client_left(request: Request, error: Exception) -> Response:
    """Ends the handler; the response goes nowhere, but is counted."""
    note_error(request.scope, CLIENT_LEFT)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals, for unknown paths and wrong methods, in the shape of the API that was asked."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    path = request.url.path
    why = why_unserved(path)
    if why is not None:
        status = HTTPStatus.NOT_FOUND  # also where another path's route takes it for an id
    elif request.headers.get("upgrade", "").lower() == "websocket":
        why = NO_WEBSOCKETS
    elif status is HTTPStatus.NOT_FOUND:
        why = NO_SUCH_PATH
    headers = dict(error.headers or {})
    if status is HTTPStatus.METHOD_NOT_ALLOWED:  # the framework names the methods of one route, not of the path
        routes = [each for each in request.app.routes if isinstance(each, Route) and each.path_regex.match(path)]
        headers["allow"] = ", ".join(sorted({name for each in routes for name in each.methods or ()}))
        why = why or f"wrong method; use {headers['allow']}"
    message = f"{request.method} {path}: {why or error.detail}"
    answer = await _on_api_error(request, ApiError(status, message, code=status.name.lower()))
    answer.headers.update(headers)
    return answer
