"""OpenAI's Responses API: POST /v1/responses, and the responses that are stored."""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from router.api.answering import Answering
from router.api.clients import client_of
from router.api.openapi import errors, event_stream, generation_route
from router.api.responses_api.conversations import PreviousWanted, read_continued, read_response
from router.api.responses_api.response_bodies import ResponsesBody
from router.api.responses_api.response_schemas import DeletedResponse, ResponseEvent, ResponseResource
from router.api.responses_api.response_writer import ResponseWriter
from router.api.responses_api.stored_responses import StoredResponse, StoredResponses
from router.errors import ApiError, bad_request

PATH = "/v1/responses"
REASONS = "it was never stored, was dropped (stored_response_s, max_stored_bytes), or is another client's or router's"
NOT_STORED = errors([HTTPStatus.NOT_FOUND], {HTTPStatus.NOT_FOUND: "No such response is stored here."})


def add_response_routes(app: FastAPI, answering: Answering, stored: StoredResponses) -> None:
    @app.post(PATH, **generation_route(ResponsesBody, ResponseResource, event_stream(ResponseEvent, named=True)))
    async def responses(request: Request) -> Response:
        """Answers items with items, whole or as a stream, and keeps the response for the next turn."""
        tenant, loop = client_of(request).owner, asyncio.get_running_loop()
        previous: tuple[bytes, ...] = ()
        async with answering.generation_data(request) as data:
            asked = await answering.parsed(request, read_response, data)
            if isinstance(asked, PreviousWanted):
                found = stored.get(tenant, asked.response_id)
                if found is None:
                    raise _no_previous(asked.response_id)
                previous = found.items
                with answering.holding(request, sum(map(len, previous))):
                    asked = await answering.parsed(request, partial(read_continued, previous), data, previous)

        def keep(response_id: str, resource: str, items: tuple[bytes, ...]) -> None:
            response = StoredResponse(resource.encode(), (*previous, *items))
            loop.call_soon_threadsafe(stored.put, tenant, response_id, response)

        return await answering.generate(request, asked.generation, partial(ResponseWriter, asked, keep))

    @app.get(f"{PATH}/{{response_id:path}}", response_model=ResponseResource, responses=NOT_STORED)
    async def stored_response(response_id: str, request: Request) -> Response:
        """A stored response, as it was answered."""
        if request.query_params.get("stream", "false") != "false":
            raise bad_request("stream: a stored response is returned whole; leave it out", "stream")
        found = stored.get(client_of(request).owner, response_id)
        if found is None:
            raise _not_stored(response_id)
        return Response(found.resource, media_type="application/json")

    @app.delete(f"{PATH}/{{response_id:path}}", response_model=DeletedResponse, responses=NOT_STORED)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Drops a stored response."""
        if not stored.delete(client_of(request).owner, response_id):
            raise _not_stored(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _not_stored(response_id: str) -> ApiError:
    message = f"no response {response_id!r:.80} is stored here: {REASONS}"
    if response_id.endswith("/input_items"):
        message = "GET /v1/responses/ID/input_items: this server lists no input; GET /v1/responses/ID has the output"
    return ApiError(HTTPStatus.NOT_FOUND, message, param="response_id", code="response_not_found")


def _no_previous(response_id: str) -> ApiError:
    message = f"previous_response_id {response_id!r:.80}: {REASONS}; send all items in input"
    return bad_request(message, "previous_response_id", "previous_response_not_found")
