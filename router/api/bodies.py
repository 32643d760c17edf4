"""Request bodies: read within limits of size, time, and the bytes that all and each of the clients hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

from fastapi import Request

from router.errors import ApiError
from router.http.limits import HttpLimits
from router.http.shares import Share, Shares

LITTLE = 1024
"""Parts of `max_bodies_bytes`: one is an ordinary body, or several, for which there is room beside clients that fill it
with uploads of a minute. 256 KiB by default."""


class Bodies:
    """The bodies that are being received or parsed."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._bytes = Shares(
            "body bytes",
            limits.max_bodies_bytes,
            "max_bodies_bytes",
            limits.max_bodies_bytes_per_client,
            little=limits.max_bodies_bytes // LITTLE,
        )

    @asynccontextmanager
    async def read(self, request: Request, client: str) -> AsyncIterator[bytes]:
        """The client's whole body, which counts until it is left.

        Raises ApiError: 413 as soon as the body is too long, or says so; 408 if it comes too slowly; 429 or 503 where
        too many bytes are held. Raises starlette's ClientDisconnect.
        """
        with self._bytes.of(client) as share:
            try:
                async with asyncio.timeout(self._limits.body_timeout_s):
                    data = await self._receive(request, share)
            except TimeoutError:
                message = f"the body did not arrive within {self._limits.body_timeout_s:g} s (body_timeout_s)"
                raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout") from None
            yield data

    @contextmanager
    def held(self, client: str, num_bytes: int) -> Iterator[None]:
        """Counts bytes that are parsed with a body of the client's and came before it; raises as `read`."""
        with self._bytes.of(client) as share:
            share.add(num_bytes)
            yield

    async def _receive(self, request: Request, share: Share) -> bytes:
        data = bytearray()
        self._check(int(request.headers.get("content-length", 0)))
        async for chunk in request.stream():
            share.add(len(chunk))
            data += chunk
            self._check(len(data))
        return bytes(data)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_body_bytes:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has more than {self._limits.max_body_bytes} bytes (max_body_bytes)",
                code="body_too_large",
            )
