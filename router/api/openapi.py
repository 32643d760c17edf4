"""The OpenAPI document of the router: FastAPI's, and the bodies and chunks that routes read and write themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from router.api.clients import access_needed
from router.api.request_ids import HEADER, VALID
from router.api.response_schemas import ErrorBody

DESCRIPTION = """Prefill and decode of hybrid LLMs on different nodes, behind OpenAI's API.

Errors have OpenAI's shape, or Anthropic's below /v1/messages. Fields that those do not have are Headrace's own, or of
other servers."""
REFERENCE = "#/components/schemas/{model}"

CAUSES = {
    HTTPStatus.BAD_REQUEST: "A field is wrong, or the prompt does not fit the model.",
    HTTPStatus.NOT_FOUND: "No such model.",
    HTTPStatus.REQUEST_TIMEOUT: "The body did not arrive within `body_timeout_s`.",
    HTTPStatus.CONFLICT: "A request with this `x-request-id` is being answered; ask again after `Retry-After` seconds.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is longer than `max_body_bytes`, or reading it takes too much.",
    HTTPStatus.TOO_MANY_REQUESTS: "The queue, or this client's share, is full; try again after `Retry-After` seconds.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The router failed.",
    HTTPStatus.SERVICE_UNAVAILABLE: "No node can take the request; it may succeed after `Retry-After` seconds.",
    HTTPStatus.GATEWAY_TIMEOUT: "The request took longer than `request_timeout_s`.",
}

REQUEST_ID = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "The client's id of this request; returned with the answer. Asked again under the same id after the "
    "router was lost, at any router, an answer goes on where it was.",
    "schema": {"type": "string", "pattern": f"^{VALID}$"},
}

KEY_ERRORS = {
    HTTPStatus.UNAUTHORIZED: "API keys are on, and the request has none that is known.",
    HTTPStatus.FORBIDDEN: "The API key does not allow this.",
}
KEYS = {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
RETRYABLE = (HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)

Responses = dict[int | str, dict[str, Any]]


def errors(
    statuses: Iterable[HTTPStatus],
    causes: Mapping[HTTPStatus, str] = CAUSES,
    retryable: Collection[HTTPStatus] = RETRYABLE,
    body: type[BaseModel] = ErrorBody,
) -> Responses:
    """The `responses` of a route for these errors; those of `retryable` come with a Retry-After."""
    return {
        int(status): {
            "model": body,
            "description": causes[status],
            "headers": RETRY_AFTER if status in retryable else {},
        }
        for status in statuses
    }


def json_body(body: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads `body` itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(body)}}}}


def event_stream(*data: type[BaseModel], named: bool = False, done: bool = True) -> dict[str, Any]:
    """The content of an answer that streams these objects, one in each server-sent event's `data`.

    Written as FastAPI's own: `itemSchema` of OpenAPI 3.2, the event as a client parses it.

    named  an event has its data's `type` as its name
    done   `[DONE]` ends the stream
    """
    json_data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _any_of([_reference(each) for each in data]),
    }
    name = {"event": {"type": "string", "description": "The `type` in `data`."}} if named else {}
    events = [_object({**name, "data": json_data})]
    if done:
        events.append(_object({"data": {"const": "[DONE]", "description": "Ends the stream."}}))
    return {"text/event-stream": {"itemSchema": _any_of(events)}}


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def generation_route(
    body: type[BaseModel], answer: type[BaseModel], stream: dict[str, Any], error: type[BaseModel] = ErrorBody
) -> dict[str, Any]:
    """The description of a route that reads `body`, and answers whole or as an `event_stream`."""
    return {
        "responses": {
            200: {"model": answer, "content": stream, "description": "The answer."},
            **errors(CAUSES, body=error),
        },
        "openapi_extra": {**json_body(body), "parameters": [REQUEST_ID]},
    }


def parsing_route(body: type[BaseModel], answer: type[BaseModel], error: type[BaseModel] = ErrorBody) -> dict[str, Any]:
    """The description of a route that reads `body` as the generating ones do, and runs nothing."""
    unknown = (HTTPStatus.CONFLICT,)
    statuses = [status for status in CAUSES if status not in unknown]
    return {
        "responses": {200: {"model": answer, "description": "The answer."}, **errors(statuses, body=error)},
        "openapi_extra": json_body(body),
    }


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": REFERENCE.format(model=model.__name__)}


def _key_responses(others: Mapping[str, Any]) -> dict[str, Any]:
    """The answers to a request whose key will not do; `others`, of the same route, give their error's shape."""
    shape = next(
        (
            answer["content"]
            for status, answer in others.items()
            if status.startswith("4") and "application/json" in answer.get("content", {})
        ),
        {"application/json": {"schema": _reference(ErrorBody)}},
    )
    return {str(int(status)): {"description": cause, "content": shape} for status, cause in KEY_ERRORS.items()}


def openapi_document(
    app: FastAPI, bodies: Iterable[type[BaseModel]], chunks: Iterable[type[BaseModel]]
) -> dict[str, Any]:
    """The document at /openapi.json: the routes' own description, and the schemas of the bodies that they read and the
    chunks that they stream."""
    document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
    read: list[tuple[type[BaseModel], JsonSchemaMode]] = [(body, "validation") for body in bodies]
    written: list[tuple[type[BaseModel], JsonSchemaMode]] = [(chunk, "serialization") for chunk in chunks]
    schemas = document["components"]["schemas"]
    for models in (read, written):
        _, described = models_json_schema(models, ref_template=REFERENCE)
        schemas.update(described["$defs"])
    document["components"]["securitySchemes"] = KEYS
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)  # FastAPI's validation error, which no route here answers with
            if access_needed(method.upper(), path) is not None:
                operation["security"] = [{}, *({name: []} for name in KEYS)]  # keys may be off
                operation["responses"] |= _key_responses(operation["responses"])
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    return document
