"""The `x-request-id` of a client: checked, returned with every answer, and the base of the ids of its requests.

A client that chooses its id may ask for the same answer again, at any router: a decode node whose router was lost keeps
the request for a while under that id.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import bad_request

HEADER = "x-request-id"
MAX_LENGTH = 128
VALID = rf"[A-Za-z0-9._:=+/-]{{1,{MAX_LENGTH}}}"
_KEY = "headrace.request_id"


@dataclass(frozen=True)
class RequestId:
    """The id of one HTTP request. `fault`: what is wrong with the client's own, which this one then replaces."""

    value: str
    is_given: bool = False
    fault: str | None = None

    @classmethod
    def of(cls, given: str | None) -> RequestId:
        """The client's id if it is valid, else a new one."""
        if given is None:
            return cls(uuid.uuid4().hex)
        if re.fullmatch(VALID, given):
            return cls(given, is_given=True)
        shown = given if len(given) <= 40 else f"{given[:40]}..."
        fault = f"{HEADER} {shown!r}: use 1 to {MAX_LENGTH} letters, digits, or characters of . _ : = + / -"
        return cls(uuid.uuid4().hex, fault=fault)


class IdentifiedApp:
    """Passes requests on to `app`, each with a `RequestId`, and names it in the answer's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[_KEY] = RequestId.of(Headers(scope=scope).get(HEADER))

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id.value
            await send(message)

        await self._app(scope, receive, identified)


def request_id_of(scope: Scope) -> RequestId:
    """The id of a request that came through `IdentifiedApp`; raises ApiError (400) for one that is not valid."""
    request_id: RequestId = scope[_KEY]
    if request_id.fault is not None:
        raise bad_request(request_id.fault, HEADER)
    return request_id
