"""The UCX transport: one worker, one listener, and parts that are probed for before they are received.

Every message is matched by a probe with an empty mask and taken out of UCX's unexpected queue, whoever sent
it. If a session expects its nonce, the session decides when and where to receive it; otherwise it is dropped,
so nothing of a cancelled session stays behind. What UCX 1.21 does with a message held by its probe's handle:

- a long message (rendezvous, from 8 KiB) stays with its sender until `receive`: the back-pressure;
- received into a buffer that is too short it moves no byte and tells its sender "done": how to drop it;
- if its sender dies, or the connection is force-closed, the receive completes with an error. (Over TCP; not
  over shared memory: see `UcxConfig.transports`.)

The receiver learns which connection carries a session from the envelopes: a sender says a random id at the receiver's
door (see `transfer.ucx.lifeline`), then over the connection's stream, before any message, and again in every envelope.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import ucxx._lib.libucxx as ucx

from transfer.backend import Inbox
from transfer.buffers import Buffer
from transfer.protocol.envelope import Tag
from transfer.protocol.errors import ConnectionLost, PeerUnreachable, TransferTimeout, TransportUnavailable
from transfer.protocol.routing import Routes
from transfer.protocol.stats import TransportStats
from transfer.ucx.connections import Link, UcxConnection, Watcher
from transfer.ucx.lifeline import ID_BYTES, Door, reach
from transfer.ucx.progress import ProgressLoop
from transfer.ucx_config import UcxConfig

logger = logging.getLogger(__name__)

PROBES_A_TURN = 64
HELLO_DEADLINE_S = 5.0
CLOSE_GRACE_S = 2.0
ANY_TAG = ucx.UCXXTag(0)
ANY_MASK = ucx.UCXXTagMask(0)


class UcxArrival:
    """A message that UCX holds for us under its probe's handle."""

    def __init__(self, transport: "UcxTransport", probe: Any) -> None:
        self.tag = Tag.of(probe.sender_tag.value)
        self.num_bytes: int = probe.length
        self._transport = transport
        self._probe = probe

    def receive(self, buffer: Buffer, deadline_s: float, connection_id: int | None) -> asyncio.Future[None]:
        if connection_id is None:
            return self._taken(buffer, deadline_s, None)
        link = self._transport.incoming(connection_id)
        if link is not None:
            reason = f"{self.tag} did not arrive by its deadline"
            return self._taken(buffer, deadline_s, lambda: link.lose(reason, forced=True))
        self.drop()
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        refused.set_exception(ConnectionLost(unknown(connection_id)))
        return refused

    def drop(self) -> None:
        if self._probe is None:
            return
        self._transport.stats.dropped_parts += 1
        self._transport.stats.dropped_bytes += self.num_bytes
        deadline_s = asyncio.get_running_loop().time() + HELLO_DEADLINE_S
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
    """See `transfer.backend.Transport`. Made by `transfer.ucx.open_transport`, inside its event loop."""

    def __init__(self, config: UcxConfig) -> None:
        self.stats = TransportStats()
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._routes: Routes[Inbox] = Routes()
        self._connecting: dict[str, asyncio.Task[UcxConnection]] = {}
        self._outgoing: dict[str, UcxConnection] = {}
        self._incoming: dict[int, Link] = {}
        self._greeting: set[Link] = set()
        """Accepted connections that have not said their id yet."""
        try:
            self.progress = ProgressLoop(self._route, config.cuda_poll_s if config.cuda else 0.0)
            self._require_transports()
            self._listener = ucx.UCXListener.create(self.progress.worker, 0, self._connected, (), {})
            self._door = Door(config.host, config.port, self._listener.port, config.silence_s)
        except (ucx.UCXError, OSError) as error:
            raise TransportUnavailable(
                f"UCX cannot start with {config}: {error}; check the names in transports and net_devices "
                "(`ucx_info -d` lists them), and whether the port is free at the host"
            ) from error
        self.address = f"{config.host}:{self._door.port}"

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
            self._connecting[peer].add_done_callback(lambda task: self._tried(peer, task))
        try:
            async with asyncio.timeout_at(deadline_s):
                return await asyncio.shield(self._connecting[peer])
        except TimeoutError:
            raise TransferTimeout(f"{peer} did not answer a connection request in time") from None

    async def _connect(self, peer: str) -> UcxConnection:
        """Done once the peer has our hello, so the path works in this direction."""
        host, _, port = peer.rpartition(":")
        connection_id = secrets.randbits(8 * ID_BYTES)
        try:
            lifeline, listener_port = await reach(host, int(port), connection_id, self._config.silence_s)
        except (OSError, ValueError) as error:
            raise PeerUnreachable(f"no connection to {peer!r}, which must be host:port: {error}") from error
        try:
            connection = self._endpoint_to(lifeline.peer_host, listener_port, connection_id)
        except ucx.UCXError as error:
            lifeline.close()
            raise PeerUnreachable(f"no connection to {peer!r}, where {lifeline.peer_host} answered: {error}") from error
        connection.tie_to(lifeline)
        hello = np.frombuffer(connection_id.to_bytes(ID_BYTES), np.uint8)
        try:
            await self._greet(connection, connection.endpoint.stream_send, hello)
        except (ConnectionLost, TransferTimeout) as error:
            connection.lose("it was never made")
            raise PeerUnreachable(f"no connection to {peer!r}, is the node up? {error}") from error
        if connection.lost is not None:  # behind the hello, before this task's turn
            raise PeerUnreachable(f"no connection to {peer!r}, is the node up? {connection.lost}")
        self.stats.connections_opened += 1
        self._outgoing[peer] = connection
        logger.info("connected to %s over %s", peer, ",".join(connection.lanes))
        return connection

    def _endpoint_to(self, host: str, port: int, connection_id: int) -> UcxConnection:
        endpoint = self.progress.worker.create_endpoint_from_hostname(host, port, True)
        return UcxConnection(self.progress, endpoint, self.stats, self._disconnected, connection_id)

    def _tried(self, peer: str, task: asyncio.Task[UcxConnection]) -> None:
        del self._connecting[peer]
        if not task.cancelled():
            task.exception()  # whoever still waits has it; nobody need

    def _greet(self, link: Link, post: Callable[[Any], Any], hello: Buffer) -> asyncio.Future[None]:
        deadline_s = self._loop.time() + HELLO_DEADLINE_S
        return self.progress.start(post, hello, deadline_s, lambda: link.lose("no hello in time", forced=True))

    # ------------------------------------------------------------ receiving

    def expect(self, nonce: int, inbox: Inbox) -> None:
        self._routes.expect(nonce, inbox)

    def forget(self, nonce: int) -> None:
        self._routes.forget(nonce)

    def hasten(self, nonce: int, deadline_s: float) -> None:
        self.progress.hasten(nonce, deadline_s)

    def watch(self, connection_id: int, on_lost: Watcher) -> Callable[[], None]:
        link = self._incoming.get(connection_id)
        if link is None:
            self._loop.call_soon(on_lost, unknown(connection_id))
            return lambda: None
        return link.watch(on_lost)

    def incoming(self, connection_id: int) -> Link | None:
        return self._incoming.get(connection_id)

    def _route(self) -> bool:
        for _ in range(PROBES_A_TURN):
            probe = self.progress.worker.tag_probe(ANY_TAG, ANY_MASK, remove=True)
            if not probe.matched:
                return False
            arrival = UcxArrival(self, probe)
            inbox = self._routes.destination(arrival.tag)
            if inbox is None:
                arrival.drop()
            else:
                inbox.announced(arrival)
        return True

    def _connected(self, connection_request: int) -> None:
        """Called by UCX's listener from inside its progress: nothing may be raised here."""
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(connection_request, True)
            link = Link(self.progress, endpoint, self.stats, self._disconnected)
            hello = np.zeros(ID_BYTES, np.uint8)
            greeted = self._greet(link, endpoint.stream_recv, hello)
        except ucx.UCXError as error:
            logger.warning("a connection request could not be accepted: %s", error)
            return
        self._greeting.add(link)
        greeted.add_done_callback(lambda done: self._greeted(link, hello, done))

    def _greeted(self, link: Link, hello: Buffer, done: asyncio.Future[None]) -> None:
        self._greeting.discard(link)
        error = done.exception()
        connection_id = int.from_bytes(hello.tobytes())
        lifeline = self._door.lifeline(connection_id)
        if error is not None:
            link.lose(f"no hello: {error}")
        elif lifeline is None or connection_id in self._incoming:
            link.lose("it says the id of a connection that is not its own")
        elif link.lost is None:
            link.tie_to(lifeline)
            self._incoming[connection_id] = link

    def _disconnected(self, link: Link) -> None:
        self._incoming = {name: other for name, other in self._incoming.items() if other is not link}
        self._outgoing = {peer: other for peer, other in self._outgoing.items() if other is not link}

    # ------------------------------------------------------------ the rest

    def describe(self) -> dict[str, str]:
        return {
            "transport": "ucx",
            "address": self.address,
            "version": ".".join(str(part) for part in ucx.get_ucx_version()),
            "allowed": self._config.environment()["UCX_TLS"],
            "net_devices": self._config.net_devices,
            **{f"to {peer}": ",".join(link.lanes) for peer, link in self._outgoing.items()},
        }

    async def close(self) -> None:
        for task in tuple(self._connecting.values()):
            task.cancel()
        for link in [*self._outgoing.values(), *self._incoming.values(), *self._greeting]:
            link.lose("this node closed its transport")
        await self._door.close()
        await self.progress.close(CLOSE_GRACE_S)
