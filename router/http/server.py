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
from router.http.connections import Connections
from router.http.limits import HttpLimits
from router.http.protocol import BoundedHttpProtocol

OTHER_FILES = 256
"""Files that a router may need beside clients' connections: nodes, workers, logs."""

STOP_POLL_S = 0.01

log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Serves an ASGI application within limits; installs no signal handlers, for the hosting process has its own.

    count   is called with route, status and code of each answer that does not reach the application
    """

    def __init__(
        self, app: Any, limits: HttpLimits, shutdown_grace_s: float, count: Callable[[str, int, str], None]
    ) -> None:
        protocol: Any = partial(BoundedHttpProtocol, limits=limits, connections=Connections(limits), count=count)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                log_config=None,  # its own would write lines without the time, past the process's log
                log_level="error",  # its warnings are about what clients send: as many as they like
                access_log=False,
                lifespan="off",
                timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]  # given to call_later
            )
        )
        self._limits = limits
        self._grace_s = shutdown_grace_s
        self._stopping = asyncio.Event()

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

    def begin_to_stop(self) -> None:
        """Closes the listener and idle connections; `serving` ends once the others have, at the latest after the grace
        period."""
        self._stopping.set()

    async def main_loop(self) -> None:
        """Waits for the stop, and dates answers anew each second. uvicorn's own looks ten times a second."""
        while not self._stopping.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which takes a tenth of a second at least."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self._grace_s):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(STOP_POLL_S)
        except TimeoutError:
            log.error("%d requests in flight are cancelled: the grace period is over", len(self.server_state.tasks))
            for task in self.server_state.tasks:
                task.cancel()


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
