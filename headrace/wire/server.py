"""The gRPC server of every Headrace process: health, reflection, message limits, one address."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.wire.connection_options import CONTROL_SILENCE_S, connection_options
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.tls import Identity

SERVER_OPTIONS = (
    # Clients ping even idle connections every second; by default a server closes such connections as abusive.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two processes must not share a port by accident.
    ("grpc.so_reuseport", 0),
)


class ListenError(OSError):
    """The server cannot listen on its address."""


class ControlServer:
    """A gRPC server with the standard health service and reflection for the named services.

    With an identity it requires TLS, and from each client a certificate of the same authority.
    """

    def __init__(
        self,
        services: Sequence[str],
        add: Callable[[grpc.aio.Server], None],
        identity: Identity | None = None,
        *,
        silence_s: float = CONTROL_SILENCE_S,
    ) -> None:
        """`silence_s`: how long a caller may leave a ping unanswered."""
        self._silence_s = silence_s
        self._identity = identity
        self._add = add
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names = [pb.DESCRIPTOR.services_by_name[name].full_name for name in services]

    async def start(self, host: str, port: int) -> int:
        """Listens (port 0: any free one) and serves; returns the port. Raises ListenError."""
        server = self._made()
        try:
            bound = self._add_port(server, f"{host}:{port}")
        except RuntimeError as error:
            # Start and stop it: gRPC prints an empty error at exit for a server that never ran.
            await server.start()
            await server.stop(None)
            raise ListenError(f"cannot listen on {host}:{port}: is the port taken? {error}") from error
        await server.start()
        self._server = server
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return bound

    def _made(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=(*connection_options(self._silence_s), *SERVER_OPTIONS))
        self._add(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    def _add_port(self, server: grpc.aio.Server, address: str) -> int:
        if self._identity is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._identity.server_credentials())

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING, gives calls in flight `grace_s` seconds, then cancels them. No-op before `start`."""
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(grace_s)
