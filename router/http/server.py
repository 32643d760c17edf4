"""The router's HTTP server: uvicorn behind a listener of our own, with every connection bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from headrace.wire.server import ListenError
from router.http.limits import HttpLimits
from router.http.protocol import BoundedHttpProtocol
from router.http.shares import Shares

OTHER_FILES = 256
"""Files that a router may need beside clients' connections: nodes, workers, logs."""

log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Serves an ASGI application within limits; installs no signal handlers, for the hosting process has its own.

    count   is called with route, status and code of each answer that does not reach the application
    """

    def __init__(
        self, app: Any, limits: HttpLimits, shutdown_grace_s: float, count: Callable[[str, int, str], None]
    ) -> None:
        connections = Shares(
            "connections", limits.max_connections, "max_connections", limits.max_connections_per_client
        )
        protocol: Any = partial(BoundedHttpProtocol, limits=limits, connections=connections, count=count)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                log_level="error",  # its warnings are about what clients send: as many as they like
                access_log=False,
                lifespan="off",
                timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]  # given to call_later
                timeout_graceful_shutdown=int(shutdown_grace_s) or 1,
            )
        )
        self._limits = limits

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def start(self, host: str, port: int) -> int:
        """Listens, serves in the background, and returns the port; raises ListenError."""
        _allow_open_files(self._limits.max_connections + OTHER_FILES)
        listener = _listen(host, port)
        self.serving = asyncio.create_task(self.serve(sockets=[listener]))
        number: int = listener.getsockname()[1]
        return number


def _allow_open_files(wanted: int) -> None:
    """Raises the process's soft limit where the hard one allows it; each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            log.warning(
                "max_connections needs %d open files and this process may have %d: raise `ulimit -n`", wanted, allowed
            )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio sets no TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # now, not when uvicorn starts: clients may connect as soon as the address is known
    except OSError as error:
        listener.close()
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}; is the port taken?") from error
    return listener
