"""Clients of HTTP requests: by their API keys, or else by a gateway's header or their address."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus

from fastapi import Request

from headrace.wire.tls import is_loopback
from router.config import RouterConfig
from router.errors import ApiError
from router.keys import Access, ApiKey, KeyRing
from router.requests.client import Client, TokenRate

log = logging.getLogger(__name__)

MAX_NAME_LENGTH = 256
OPEN = frozenset(
    {"/", "/static/page.js", "/static/page.css", "/health", "/ready", "/version", "/docs", "/openapi.json"}
)
"""Paths without anything of anybody: probes, and what is the same on every router."""
ALLOWS: Mapping[Access, frozenset[Access]] = {
    "generate": frozenset({"generate"}),
    "view": frozenset({"view"}),
    "operate": frozenset({"generate", "view", "operate"}),
}

_CLIENT = "headrace.client"


def access_needed(method: str, path: str) -> Access | None:
    """The access that a request needs; None: no key at all. A route without a name here is one to generate."""
    if path in OPEN:
        return None
    if path == "/metrics" or path == "/cluster" or path.startswith("/cluster/"):
        return "view" if method in ("GET", "HEAD") else "operate"
    return "generate"


class Clients:
    """The clients of one router.

    keys   by name; None: keys are off, and clients are told apart by header or address
    """

    def __init__(
        self, config: RouterConfig, keys: Mapping[str, ApiKey] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._header = config.client_header
        self._priorities = {_labelled(name, self._header): number for name, number in config.priorities.items()}
        self._clock = clock
        self._rates: dict[str, TokenRate] = {}
        self._ring: KeyRing | None = None
        if keys is not None:
            self.use(keys)
            return
        level = logging.INFO if is_loopback(config.host) else logging.WARNING
        log.log(
            level,
            "API keys are off at %s: whoever reaches it can use it; see docs/security.md",
            config.host,
        )

    def use(self, keys: Mapping[str, ApiKey]) -> None:
        """These keys alone from now on; what was used of a rate stays used."""
        rates = {name: key.tokens_per_minute for name, key in keys.items() if key.tokens_per_minute is not None}
        for name, per_minute in rates.items():
            if name in self._rates:
                self._rates[name].change(per_minute)
        self._rates = {
            name: self._rates.get(name) or TokenRate(per_minute, self._clock) for name, per_minute in rates.items()
        }
        self._ring = KeyRing(keys)

    def of(self, request: Request) -> Client:
        """The client of a request; raises ApiError: 401 without a known key, 403 for one that may not do this."""
        if self._ring is None:
            return self._without_key(request)
        needed = access_needed(request.method, request.url.path)
        if needed is None:
            return Client("")
        presented = _presented(request)
        if not presented:
            raise _unauthorized("no API key: send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`")
        found = self._ring.find(presented)
        if found is None:
            raise _unauthorized("the API key is not known here; it may have been withdrawn")
        name, key = found
        if needed not in ALLOWS[key.access]:
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                f"key {name} has the access {key.access!r}: {request.method} {request.url.path} needs {needed!r}",
                code="access_denied",
            )
        tenant = f"tenant {key.tenant}" if key.tenant else f"key {name}"
        return Client(name, tenant, key.priority, self._rates.get(name))

    def _without_key(self, request: Request) -> Client:
        given = request.headers.get(self._header) if self._header else None
        name = _labelled(given, self._header) if given else request.client.host if request.client else ""
        return Client(name, priority=self._priorities.get(name, 0))


def note_client(request: Request, client: Client) -> None:
    """Keeps a request's client for `client_of`."""
    request.scope[_CLIENT] = client


def client_of(request: Request) -> Client:
    """The client of a request that has come through the application's check of keys."""
    client: Client = request.scope[_CLIENT]
    return client


def _presented(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def _labelled(name: str, header: str) -> str:
    """The client with this value of `header`, or at this address where there is no such header."""
    return f"{header}: {name[:MAX_NAME_LENGTH]}" if header else name


def _unauthorized(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
