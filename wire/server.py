"""A gRPC server as every Headrace process runs it: health, reflection, message limits, one address."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from wire.client import MAX_MESSAGE_BYTES
from wire.generated import headrace_pb2 as pb
from wire.tls import Identity

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients ping idle connections every second (CHANNEL_OPTIONS): do not take that for abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two processes must not share a port by accident.
    ("grpc.so_reuseport", 0),
)


class ListenError(OSError):
    """The address cannot be listened on."""


class ControlServer:
    """A gRPC server with the standard health service and reflection over the named services.

    With an identity it talks TLS, to clients that show a certificate of the same authority, and to no others.
    """

    def __init__(
        self, services: Sequence[str], add: Callable[[grpc.aio.Server], None], identity: Identity | None = None
    ) -> None:
        self._identity = identity
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names = [pb.DESCRIPTOR.services_by_name[name].full_name for name in services]
        add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listens (port 0: any free one) and serves; returns the port."""
        try:
            bound = self._add_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {host}:{port}: is the port taken? {error}") from error
        await self._server.start()
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return bound

    def _add_port(self, address: str) -> int:
        if self._identity is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, self._identity.server_credentials())

    async def stop(self, grace_s: float) -> None:
        """Says NOT_SERVING, gives calls in flight `grace_s` seconds, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
