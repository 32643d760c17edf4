"""Names of clients, by which the router shares places and memory."""

from __future__ import annotations

from fastapi import Request

MAX_NAME_LENGTH = 256


def client_of(request: Request, header: str) -> str:
    """The name of a request's client: the value of `header` that a gateway has set, or else the peer's address."""
    name = request.headers.get(header) if header else None
    return named_client(name, header) if name else request.client.host if request.client else ""


def named_client(name: str, header: str) -> str:
    """The client with this value of `header`, or at this address where there is no such header."""
    return f"{header}: {name[:MAX_NAME_LENGTH]}" if header else name
