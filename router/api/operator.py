"""Routes with which an operator changes the cluster. With API keys they need one with the access `operate`; without,
a gateway passes on /v1/ alone (docs/security.md)."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from headrace.wire.node_messages import Role
from router.api.bodies import Bodies
from router.api.body_schemas import parse_body
from router.api.clients import client_of
from router.api.cluster_response_schemas import DrainedNode, SwitchedRole
from router.api.openapi import errors, json_body
from router.api.operator_schemas import DrainBody, RoleBody
from router.cluster.role_switch import RoleSwitch
from router.errors import ApiError
from router.requests.drains import Drains

JSON_TYPE = "application/json"
ROLE_ERRORS = {
    HTTPStatus.BAD_REQUEST: 'The body is not `{"role": ...}`.',
    HTTPStatus.NOT_FOUND: "No such node is registered.",
    HTTPStatus.CONFLICT: "Nobody would be left to decode, and roles are fixed.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The body's type is not `application/json`.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The node does not answer; its role is what its next heartbeat says.",
}


DRAIN_ERRORS = {
    HTTPStatus.BAD_REQUEST: 'The body is not `{"timeout_s": ..., "keep": ...}`.',
    HTTPStatus.NOT_FOUND: "No such node is registered.",
    HTTPStatus.CONFLICT: "No other node decodes.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The body's type is not `application/json`.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The node is drained, and has not taken the order to stop.",
}


def add_operator_routes(app: FastAPI, roles: RoleSwitch, drains: Drains, bodies: Bodies) -> None:
    @app.post(
        "/cluster/nodes/{name}/role",
        response_model=SwitchedRole,
        responses=errors(ROLE_ERRORS, ROLE_ERRORS, retryable=[HTTPStatus.SERVICE_UNAVAILABLE]),
        openapi_extra=json_body(RoleBody),
    )
    async def switch_role(name: str, request: Request) -> Response:
        """Changes the work for which a node is preferred: at once for new requests, while running ones end there."""
        _require_json(request)
        async with bodies.read(request, client_of(request).name) as data:
            body = parse_body(RoleBody, data)
        await roles.switch(name, Role(body.role))
        return JSONResponse({"node": name, "role": body.role})

    @app.post(
        "/cluster/nodes/{name}/drain",
        response_model=DrainedNode,
        responses=errors(DRAIN_ERRORS, DRAIN_ERRORS, retryable=[HTTPStatus.SERVICE_UNAVAILABLE]),
        openapi_extra=json_body(DrainBody),
    )
    async def drain(name: str, request: Request) -> Response:
        """Moves a node's running requests to other nodes, with blocks and states, and stops it. Answers when it serves
        nothing for this router any more; other routers move theirs when it leaves them."""
        _require_json(request)
        async with bodies.read(request, client_of(request).name) as data:
            body = parse_body(DrainBody, data)
        return JSONResponse(asdict(await drains.drain(name, timeout_s=body.timeout_s, keep=body.keep)))


def _require_json(request: Request) -> None:
    """A page of another site, open in an operator's browser, can send other types without asking (CORS)."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != JSON_TYPE:
        message = f"content-type {given!r}: send {JSON_TYPE}"
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_media_type")
