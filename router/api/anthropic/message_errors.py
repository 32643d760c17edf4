"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from router.errors import ApiError

TYPES: Mapping[HTTPStatus, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def message_error(error: ApiError) -> str:
    """The body of an error's answer, and the last event of a stream that breaks."""
    is_clients = error.status < HTTPStatus.INTERNAL_SERVER_ERROR
    kind = TYPES.get(error.status, "invalid_request_error" if is_clients else "api_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": error.message}})
