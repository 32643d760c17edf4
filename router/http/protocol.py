"""One HTTP connection: uvicorn's protocol with limits on headers, on waiting and on the number of connections."""

from __future__ import annotations

import asyncio
import fcntl
import termios
from array import array
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from router.errors import ApiError
from router.http.body_writer import offer_body_writer
from router.http.connections import Connections
from router.http.limits import HttpLimits

LINGER_S = 1.0
"""A refused client gets this long to read why: closing at once, with unread input, would reset the connection."""
MAX_PIPELINED = 16
"""Requests of one connection that wait for the answers before them. asyncio reads 256 KiB at a time, which is 14,000
requests for `/`: 20 connections that sent as many held the loop for 3.4 s and 190 MiB."""
CUT_OFF = 499
"""Counted for a client that does not read its answer, as for one that leaves."""


class TooManyPipelined(Exception):
    """Ends the parsing of what a connection has sent."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection that ends when its client passes a limit.

    connections   counts this connection while it is open
    count         is called with route, status and code of each refusal that does not reach the application

    One timer serves all waits, for at any time the connection waits for one thing: the head of a request (which begins
    with the connection's or the request's first byte), the rest of a body whose answer is complete, or a client that
    should read. Waits for a body that is still wanted are the application's; idle ones are uvicorn's.
    """

    def __init__(
        self,
        *args: Any,
        limits: HttpLimits,
        connections: Connections,
        count: Callable[[str, int, str], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._connections = connections
        self._count = count
        self._timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._reading_head = True
        self._reading_body = False
        self._head_bytes = 0
        self._refusal: ApiError | None = None
        self._is_over = False  # refused: what still comes is thrown away

    # -------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        try:
            self._connections.opened(self, self._address)
        except ApiError as error:
            self._refuse(error)
        else:
            self._wait(self._limits.header_timeout_s, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._connections.closed(self, self._address)
        super().connection_lost(exc)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def is_idle(self) -> bool:
        has_answered = self.cycle is None or self.cycle.response_complete
        return self._reading_head and has_answered and not self.transport.get_write_buffer_size()

    def give_way(self) -> None:
        self._count("", HTTPStatus.SERVICE_UNAVAILABLE, "connection_gave_way")
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._reading_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._wait(self._limits.header_timeout_s, self._on_late_head)
        super().data_received(data)
        if self._reading_head and self._head_bytes > self._limits.max_header_bytes:
            self._refusal = self._too_long()
        if self._refusal is not None and not self._is_over:
            self._refuse(self._refusal)

    # -------------------------------------------------------------- one request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is not None and self._timer is self._idle_timer:
            self._wait(self._limits.header_timeout_s, self._on_late_head)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._reading_head:  # trailers of a chunked body count, too
            self._head_bytes += len(name) + len(value)
            if self._head_bytes > self._limits.max_header_bytes:
                self._refusal = self._too_long()
                return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._head_bytes > self._limits.max_header_bytes:
            self._refusal = self._too_long()
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait on one connection for answers before theirs"
            self._refusal = ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="too_many_pipelined")
            raise TooManyPipelined
        if self._refusal is None:
            if not self.flow.write_paused:  # else the timer waits for a reader, whatever it has asked for meanwhile
                self._stop_waiting()
            self._reading_head = False
            self._reading_body = True
            super().on_headers_complete()
            offer_body_writer(self.cycle.scope, self.cycle)  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refusal is not None:
            return
        super().on_message_complete()
        self._reading_body = False
        self._reading_head = True
        self._head_bytes = 0
        if self.cycle.response_complete:  # a body that nobody wanted: the connection is idle now
            self._wait(self._limits.idle_timeout_s, self.transport.abort)
            self._idle_timer = self._timer

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._reading_body:  # of a request that was refused early: what is left is swallowed, but not for ever
            self._wait(self._limits.body_timeout_s, self.transport.abort)

    def _on_late_head(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            return  # the next request's head, while this one is answered: the wait begins with its next byte
        if self._head_bytes == 0:
            self.transport.close()  # a client that opened a connection and never asked
        else:
            seconds = f"{self._limits.header_timeout_s:g} s (header_timeout_s)"
            message = f"the headers did not arrive within {seconds}"
            self._refuse(ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="header_timeout"))

    # -------------------------------------------------------------- a client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():  # closing waits for the last byte, and so does the timer
            self._stop_waiting()
            if self._reading_head and self._head_bytes:
                self._wait(self._limits.header_timeout_s, self._on_late_head)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._wait_for_reader()  # closing waits until everything is written

    def _wait_for_reader(self) -> None:
        unread = _num_unread(self.transport)

        def check() -> None:
            self._timer = None
            if _num_unread(self.transport) >= unread:
                self._count("", CUT_OFF, "answer_not_read")
                self.transport.abort()
            else:
                self._wait_for_reader()

        if unread:
            self._wait(self._limits.unread_timeout_s, check)

    # -------------------------------------------------------------- refusals and timers

    def _too_long(self) -> ApiError:
        message = f"the headers have more than {self._limits.max_header_bytes} bytes (max_header_bytes)"
        return ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, code="headers_too_large")

    def send_400_response(self, msg: str) -> None:
        """Replaces uvicorn's plain text for input that is no HTTP, or that is parsed no further."""
        no_http = ApiError(HTTPStatus.BAD_REQUEST, "this is no valid HTTP request", code="invalid_http")
        self._refuse(self._refusal or no_http)

    def _refuse(self, error: ApiError) -> None:
        """Answers without the application, and ends the connection once the client has read it, or `LINGER_S` later."""
        if self.transport.is_closing():
            return
        self._is_over = True
        self._unset_keepalive_if_required()
        self._count("", error.status, error.code or "")
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of another answer
            return
        body = error.json().encode()
        head = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body),
        ]
        if error.retry_after_s is not None:
            head.append(b"retry-after: %d\r\n" % error.retry_after_s)
        self.transport.write(b"".join([*head, b"\r\n", body]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._wait(LINGER_S, self.transport.abort)

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _num_unread(transport: asyncio.Transport) -> int:
    """Bytes that the client's host has not taken: in the process, and in the kernel, which holds some megabytes."""
    num_bytes = transport.get_write_buffer_size()
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        queued = array("i", [0])
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, queued)
        num_bytes += queued[0]
    return num_bytes
