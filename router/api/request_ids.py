"""The `x-request-id` of a client: checked, returned with every answer, and the base of the ids of its requests.

A client that chooses its id may ask for the same answer again, at any router: a decode node whose router was lost keeps
the request for a while under that id.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, replace
from hashlib import blake2b

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.generation import GenerationRequest, seeds_from
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


def identified(generation: GenerationRequest, request_id: RequestId) -> GenerationRequest:
    """The generation request under this id.

    Two routers make the same of one body and one given id: the ids of its requests, and their seeds where the client
    gave none. The salt is part of the ids, so that tenants with one id do not meet. Log-probabilities cannot be
    resumed: of the first token they are known to the lost router alone.
    """
    generation_id = f"{generation.id_prefix}{request_id.value}"
    requests = list(generation.requests)
    if request_id.is_given and not generation.is_seeded:
        requests = seeds_from(int.from_bytes(_digest(request_id.value.encode(), 8)), requests)
    for index, request in enumerate(requests):
        tenant = f"-{_digest(request.salt, 4).hex()}" if request.salt else ""
        has_logprobs = request.sampling.logprobs is not None or request.sampling.prompt_logprobs is not None
        requests[index] = replace(
            request,
            request_id=f"{generation_id}{tenant}-{index}",
            is_resumable=request_id.is_given and not has_logprobs,
        )
    return replace(generation, id=generation_id, requests=tuple(requests))


def _digest(data: bytes, size: int) -> bytes:
    return blake2b(data, digest_size=size).digest()
