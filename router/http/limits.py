"""Limits of the router's HTTP server. docs/security.md has them in one table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.config import at_least, positive, refuse

HEADER_NAME = re.compile("[A-Za-z0-9-]+")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Limits that keep one client from taking the router's memory, connections and time from others.

    A client is a peer address, or what `client_header` names. Behind a gateway that sets no such header all requests
    come from one client: leave out (null) the limits for each client there. Durations are in seconds, sizes in bytes.

    client_header                header in which a gateway names the client of each request, such as x-tenant; the
                                 gateway must overwrite what clients send. Empty: a client is a peer address.
                                 Connections always count by address
    cors_origins                 web pages that may call this router from a browser, as https://HOST; "*": any page.
                                 Empty: none
    max_connections              open connections; more are answered with 503 and closed
    max_connections_per_client   open connections of one client; more get 429; null: no limit
    max_header_bytes             request line and headers of one request; longer ones get 431
    header_timeout_s             time from a connection's or request's first byte to the end of its headers; then 408
    idle_timeout_s               how long a connection may wait for its next request before it is closed
    max_body_bytes               largest body of a request; longer ones get 413
    max_bodies_bytes             bodies that are being received or parsed, together; beyond that clients get 503
    max_bodies_bytes_per_client  the same for one client; beyond that it gets 429; null: no limit
    body_timeout_s               time from the end of the headers to the end of the body; then 408
    unread_timeout_s             how long a client may take nothing of an answer that waits for it; then it is cut off
    """

    client_header: str = ""
    cors_origins: tuple[str, ...] = ()
    max_connections: int = 1024
    max_connections_per_client: int | None = 512
    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 5.0
    max_body_bytes: int = 32 << 20
    max_bodies_bytes: int = 256 << 20
    max_bodies_bytes_per_client: int | None = 128 << 20
    body_timeout_s: float = 60.0
    unread_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        refuse(self._http_faults())

    def _http_faults(self) -> Iterator[str]:
        if self.client_header and not HEADER_NAME.fullmatch(self.client_header):
            yield f"client_header {self.client_header!r}: no name of an HTTP header; use letters, digits and -"
        for origin in self.cors_origins:
            if not ORIGIN.fullmatch(origin):
                yield f'cors_origins {origin!r}: no origin; use https://HOST, http://HOST:PORT or "*"'
        yield from at_least(self, 1, "max_connections", "max_connections_per_client", "max_body_bytes")
        yield from at_least(self, 1024, "max_header_bytes")
        yield from positive(self, "header_timeout_s", "idle_timeout_s", "body_timeout_s", "unread_timeout_s")
        remedy = ", the largest body (max_body_bytes)"
        yield from at_least(self, self.max_body_bytes, "max_bodies_bytes", "max_bodies_bytes_per_client", remedy=remedy)
