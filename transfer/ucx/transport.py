"""The UCX transport: one worker, one listener, and messages that are probed before they are received.

Each message is matched by a probe with an empty mask and taken out of UCX's unexpected queue, whoever sent it. If a
session expects its nonce, that session decides when and where to receive it; otherwise it is dropped, so nothing of a
cancelled session stays behind. UCX 1.21 treats a message held by its probe's handle like this:

- a long message (rendezvous, from 8 KiB) stays with its sender until `receive`, which is the back-pressure;
- received into a buffer that is too short, it moves no byte and completes at its sender, which is how to drop it;
- if its sender dies, or the connection is force-closed, the receive completes with an error. (Over TCP; not over
  shared memory: see `UcxConfig.transports`.)

Envelopes name the connection that carries their session. A sender draws a random id for each connection and sends it
over the keepalive connection (`transfer.ucx.keepalive`), then over the UCX connection's stream before any message, and
in every envelope. It sends messages once the receiver has confirmed the id: UCX takes what follows a stream's bytes
in no order, and a message of a connection that is not known yet would be refused.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import ucxx._lib.libucxx as ucx

from transfer.backend import ArrivalListener
from transfer.buffers import Buffer
from transfer.protocol.demultiplexer import Demultiplexer
from transfer.protocol.envelope import Tag
from transfer.protocol.errors import ConnectionLost, PeerUnreachable, TransferTimeout, TransportUnavailable
from transfer.protocol.stats import TransportStats
from transfer.ucx.config import UcxConfig
from transfer.ucx.endpoint import Endpoint, UcxConnection, Watcher
from transfer.ucx.keepalive import ID_BYTES, Keepalive, KeepaliveServer
from transfer.ucx.progress import ProgressLoop

logger = logging.getLogger(__name__)

PROBES_A_TURN = 64
ID_TIMEOUT_S = 5.0
"""For the connection's id on a new connection's stream, for its confirmation, and for a drop to complete."""
CLOSE_GRACE_S = 2.0
ANY_TAG = ucx.UCXXTag(0)
ANY_MASK = ucx.UCXXTagMask(0)


class UcxArrival:
    """A message that UCX holds under its probe's handle; see `transfer.backend.Arrival`."""

    def __init__(self, transport: "UcxTransport", probe: Any) -> None:
        self.tag = Tag.of(probe.sender_tag.value)
        self.num_bytes: int = probe.length
        self._transport = transport
        self._probe = probe

    def receive(self, buffer: Buffer, deadline_s: float, connection_id: int | None) -> asyncio.Future[None]:
        if connection_id is None:
            return self._taken(buffer, deadline_s, None)
        endpoint = self._transport.incoming(connection_id)
        if endpoint is not None:
            reason = f"{self.tag} did not arrive by its deadline"
            return self._taken(buffer, deadline_s, lambda: endpoint.lose(reason, forced=True))
        self.drop()
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        refused.set_exception(ConnectionLost(unknown(connection_id)))
        return refused

    def drop(self) -> None:
        if self._probe is None:
            return
        self._transport.stats.dropped_parts += 1
        self._transport.stats.dropped_bytes += self.num_bytes
        deadline_s = asyncio.get_running_loop().time() + ID_TIMEOUT_S
        dropped = self._post(np.empty(1, np.uint8), deadline_s, None, None)
        dropped.add_done_callback(lambda done: done.exception())

    def _taken(self, buffer: Buffer, deadline_s: float, expire: Callable[[], None] | None) -> asyncio.Future[None]:
        self._transport.stats.received_parts += 1
        self._transport.stats.received_bytes += self.num_bytes
        return self._post(buffer, deadline_s, expire, self.tag.nonce)

    def _post(
        self, buffer: Buffer, deadline_s: float, expire: Callable[[], None] | None, nonce: int | None
    ) -> asyncio.Future[None]:
        probe, self._probe = self._probe, None
        progress = self._transport.progress
        return progress.start(
            lambda array: progress.worker.tag_recv_with_handle(array, probe), buffer, deadline_s, expire, nonce
        )


def unknown(connection_id: int) -> str:
    return f"connection {connection_id:#x} is not, or no longer, known here"


class UcxTransport:
    """`transfer.backend.Transport` over UCX. Made by `transfer.ucx.open_transport`, inside its event loop."""

    def __init__(self, config: UcxConfig) -> None:
        self.stats = TransportStats()
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._demultiplexer: Demultiplexer[ArrivalListener] = Demultiplexer()
        self._connecting: dict[str, asyncio.Task[UcxConnection]] = {}
        self._outgoing: dict[str, UcxConnection] = {}
        self._incoming: dict[int, Endpoint] = {}
        self._unidentified: set[Endpoint] = set()
        """Accepted connections whose id has not come yet."""
        try:
            self.progress = ProgressLoop(self._route, config.cuda_poll_s if config.cuda else 0.0)
            self._require_transports()
            self._listener = ucx.UCXListener.create(self.progress.worker, 0, self._connected, (), {})
            self._keepalives = KeepaliveServer(config.host, config.port, self._listener.port, config.silence_s)
        except (ucx.UCXError, OSError) as error:
            raise TransportUnavailable(
                f"UCX cannot start at {config.host}:{config.port} with transports {config.transports!r} and "
                f"net_devices {config.net_devices!r}: {error}; the host must be an address of this machine and its "
                "port free, and `ucx_info -d` lists the names"
            ) from error
        self.address = f"{config.host}:{self._keepalives.port}"

    def _require_transports(self) -> None:
        resources = self.progress.context.info
        missing = [name for name in self._config.required_transports if f"{name}/" not in resources]
        if missing:
            raise TransportUnavailable(
                f"UCX has no {' and no '.join(missing)} here: they need the driver's libcuda and libnvidia-ml, a GPU "
                "that this process may see, and a UCX built with CUDA (ucxx-cu13's is)"
            )

    # ------------------------------------------------------------ sending

    async def connect(self, peer: str, deadline_s: float) -> UcxConnection:
        if peer in self._outgoing:
            return self._outgoing[peer]
        if peer not in self._connecting:
            self._connecting[peer] = self._loop.create_task(self._connect(peer))
            self._connecting[peer].add_done_callback(lambda task: self._connect_ended(peer, task))
        try:
            async with asyncio.timeout_at(deadline_s):
                return await asyncio.shield(self._connecting[peer])
        except TimeoutError:
            raise TransferTimeout(f"{peer} did not answer a connection request in time") from None

    async def _connect(self, peer: str) -> UcxConnection:
        """Done once the peer has confirmed the connection's id, so the path works in this direction."""
        host, _, port = peer.rpartition(":")
        connection_id = secrets.randbits(8 * ID_BYTES)
        try:
            keepalive, listener_port = await Keepalive.connect(host, int(port), connection_id, self._config.silence_s)
        except (OSError, ValueError) as error:
            raise PeerUnreachable(f"no connection to {peer!r}, which must be host:port: {error}") from error
        try:
            connection = self._endpoint_to(keepalive.peer_host, listener_port, connection_id)
        except ucx.UCXError as error:
            keepalive.close()
            where = keepalive.peer_host
            raise PeerUnreachable(f"no connection to {peer!r}, where {where} answered: {error}") from error
        connection.attach(keepalive)
        id_bytes = np.frombuffer(connection_id.to_bytes(ID_BYTES), np.uint8)
        try:
            await self._move_id(connection, connection.ucx_endpoint.stream_send, id_bytes)
            async with asyncio.timeout(ID_TIMEOUT_S):
                await keepalive.confirmed
        except (ConnectionLost, TransferTimeout, OSError) as error:
            reason = connection.lost or str(error) or f"it did not confirm the connection in {ID_TIMEOUT_S:g} s"
            connection.lose("it was never made")
            raise PeerUnreachable(f"no connection to {peer!r}, is the node up? {reason}") from error
        except asyncio.CancelledError:
            connection.lose("this node closed its transport")
            raise
        if connection.lost is not None:  # after it was confirmed, before this task's turn
            raise PeerUnreachable(f"no connection to {peer!r}, is the node up? {connection.lost}")
        self.stats.connections_opened += 1
        self._outgoing[peer] = connection
        logger.info("connected to %s over %s", peer, ",".join(connection.lanes))
        return connection

    def _endpoint_to(self, host: str, port: int, connection_id: int) -> UcxConnection:
        ucx_endpoint = self.progress.worker.create_endpoint_from_hostname(host, port, True)
        return UcxConnection(self.progress, ucx_endpoint, self.stats, self._disconnected, connection_id)

    def _connect_ended(self, peer: str, task: asyncio.Task[UcxConnection]) -> None:
        del self._connecting[peer]
        if not task.cancelled():
            task.exception()  # marks it retrieved: nobody need wait for it

    def _move_id(self, endpoint: Endpoint, post: Callable[[Any], Any], id_bytes: Buffer) -> asyncio.Future[None]:
        """Sends or receives a connection's id over its stream."""
        deadline_s = self._loop.time() + ID_TIMEOUT_S
        return self.progress.start(
            post, id_bytes, deadline_s, lambda: endpoint.lose("no connection id in time", forced=True)
        )

    # ------------------------------------------------------------ receiving

    def expect(self, nonce: int, listener: ArrivalListener) -> None:
        self._demultiplexer.expect(nonce, listener)

    def forget(self, nonce: int) -> None:
        self._demultiplexer.forget(nonce)

    def hasten(self, nonce: int, deadline_s: float) -> None:
        self.progress.hasten(nonce, deadline_s)

    def watch(self, connection_id: int, on_lost: Watcher) -> Callable[[], None]:
        endpoint = self._incoming.get(connection_id)
        if endpoint is None:
            self._loop.call_soon(on_lost, unknown(connection_id))
            return lambda: None
        return endpoint.watch(on_lost)

    def incoming(self, connection_id: int) -> Endpoint | None:
        return self._incoming.get(connection_id)

    def _route(self) -> bool:
        for _ in range(PROBES_A_TURN):
            probe = self.progress.worker.tag_probe(ANY_TAG, ANY_MASK, remove=True)
            if not probe.matched:
                return False
            arrival = UcxArrival(self, probe)
            listener = self._demultiplexer.destination(arrival.tag)
            if listener is None:
                arrival.drop()
            else:
                listener.announced(arrival)
        return True

    def _connected(self, connection_request: int) -> None:
        """Called by UCX's listener from inside its progress: must not raise."""
        try:
            ucx_endpoint = self._listener.create_endpoint_from_conn_request(connection_request, True)
            endpoint = Endpoint(self.progress, ucx_endpoint, self.stats, self._disconnected)
            id_bytes = np.zeros(ID_BYTES, np.uint8)
            received = self._move_id(endpoint, ucx_endpoint.stream_recv, id_bytes)
        except ucx.UCXError as error:
            logger.warning("a connection request could not be accepted: %s", error)
            return
        self._unidentified.add(endpoint)
        received.add_done_callback(lambda done: self._identify(endpoint, id_bytes, done))

    def _identify(self, endpoint: Endpoint, id_bytes: Buffer, done: asyncio.Future[None]) -> None:
        self._unidentified.discard(endpoint)
        error = done.exception()
        connection_id = int.from_bytes(id_bytes.tobytes())
        keepalive = self._keepalives.keepalive(connection_id)
        if error is not None:
            endpoint.lose(f"no connection id: {error}")
        elif keepalive is None or connection_id in self._incoming:
            endpoint.lose("it sent the id of a connection that is not its own")
        elif endpoint.lost is None:
            endpoint.attach(keepalive)
            self._incoming[connection_id] = endpoint
            keepalive.confirm()

    def _disconnected(self, lost: Endpoint) -> None:
        self._incoming = {name: other for name, other in self._incoming.items() if other is not lost}
        self._outgoing = {peer: other for peer, other in self._outgoing.items() if other is not lost}

    # ------------------------------------------------------------ state and end

    def describe(self) -> dict[str, str]:
        return {
            "transport": "ucx",
            "address": self.address,
            "version": ".".join(str(part) for part in ucx.get_ucx_version()),
            "allowed": self._config.environment()["UCX_TLS"],
            "net_devices": self._config.net_devices,
            **{f"to {peer}": ",".join(connection.lanes) for peer, connection in self._outgoing.items()},
        }

    async def close(self) -> None:
        connecting = tuple(self._connecting.values())
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        for endpoint in [*self._outgoing.values(), *self._incoming.values(), *self._unidentified]:
            endpoint.lose("this node closed its transport")
        await self._keepalives.close()
        await self.progress.close(CLOSE_GRACE_S)
