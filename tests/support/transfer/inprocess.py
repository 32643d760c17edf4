"""A transport between event-loop neighbours: no sockets, the same contract. For tests and a one-process demo.

Like a rendezvous over a real network, a part stays with its sender until the receiver takes or drops it.
"""

import asyncio
import secrets
from collections.abc import Callable

from transfer.backend import ArrivalListener
from transfer.buffers import Buffer
from transfer.protocol.demultiplexer import Demultiplexer
from transfer.protocol.envelope import Tag
from transfer.protocol.errors import ConnectionLost, PeerUnreachable, TransferTimeout, Truncated
from transfer.protocol.stats import TransportStats

Watcher = Callable[[str], None]


class InProcessNetwork:
    """Who can reach whom: the transports of one network, by address."""

    def __init__(self) -> None:
        self.transports: dict[str, InProcessTransport] = {}


class InProcessConnection:
    """Both ends of a connection: the sender's `Connection`, and what the receiver watches."""

    lanes = ("in-process",)

    def __init__(self, sender: "InProcessTransport", receiver: "InProcessTransport") -> None:
        self.id = secrets.randbits(64)
        self.lost: str | None = None
        self._sender = sender
        self._receiver = receiver
        self._watchers: list[Watcher] = []
        self._waiting: set[InProcessArrival] = set()

    def send(self, tag: Tag, part: Buffer, deadline_s: float) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[None] = loop.create_future()
        if self.lost is not None:
            sent.set_exception(ConnectionLost(self.lost))
            return sent
        arrival = InProcessArrival(self, tag, part, sent)
        self._waiting.add(arrival)
        self._expire_at(arrival, deadline_s)
        loop.call_soon(self._receiver.announce, arrival)
        self._sender.stats.sent_parts += 1
        self._sender.stats.sent_bytes += part.nbytes
        return sent

    def watch(self, on_lost: Watcher) -> Callable[[], None]:
        if self.lost is not None:
            asyncio.get_running_loop().call_soon(on_lost, self.lost)
            return lambda: None
        self._watchers.append(on_lost)
        return lambda: self._watchers.remove(on_lost) if on_lost in self._watchers else None

    def hasten(self, nonce: int, deadline_s: float) -> None:
        for arrival in self._waiting:
            if arrival.tag.nonce == nonce:
                self._expire_at(arrival, deadline_s)

    def _expire_at(self, arrival: "InProcessArrival", deadline_s: float) -> None:
        """Lose the connection then, if not sooner, unless the part has been taken."""
        reason = f"no answer to {arrival.tag} by its deadline"
        loop = asyncio.get_running_loop()
        timer = loop.call_at(deadline_s, lambda: self.lose(reason, TransferTimeout(reason)))
        arrival.sent.add_done_callback(lambda _: timer.cancel())

    def taken(self, arrival: "InProcessArrival") -> None:
        self._waiting.discard(arrival)

    def lose(self, reason: str, error: Exception | None = None) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        for end in (self._sender, self._receiver):
            end.disconnected(self)
        for arrival in tuple(self._waiting):
            arrival.fail(error or ConnectionLost(reason))
        for watcher in tuple(self._watchers):
            watcher(reason)


class InProcessArrival:
    """One part under way. `sent` is the sender's future."""

    def __init__(self, connection: InProcessConnection, tag: Tag, part: Buffer, sent: asyncio.Future[None]) -> None:
        self.tag = tag
        self.num_bytes = len(part)
        self._connection = connection
        self._part: Buffer | None = part
        self.sent = sent
        self._error: Exception | None = None

    def receive(self, buffer: Buffer, deadline_s: float, connection_id: int | None) -> asyncio.Future[None]:
        received: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._part is None:
            received.set_exception(self._error or ConnectionLost("the part was dropped"))
        elif len(buffer) < self.num_bytes:
            received.set_exception(Truncated(f"{self.num_bytes} bytes into a buffer of {len(buffer)}"))
        else:
            buffer[: self.num_bytes] = self._part
            received.set_result(None)
        self.drop()
        return received

    def drop(self) -> None:
        if self._part is not None:
            self._part = None
            self._connection.taken(self)
            self.sent.set_result(None)

    def fail(self, error: Exception) -> None:
        self._part = None
        self._error = error
        self._connection.taken(self)
        self.sent.set_exception(error)


class InProcessTransport:
    """A member of `network` under a name. `close` is, to its peers, the same as dying."""

    def __init__(self, network: InProcessNetwork, address: str) -> None:
        self.address = address
        self.stats = TransportStats()
        self._network = network
        self._demultiplexer: Demultiplexer[ArrivalListener] = Demultiplexer()
        self._outgoing: dict[str, InProcessConnection] = {}
        self._incoming: dict[int, InProcessConnection] = {}
        network.transports[address] = self

    async def connect(self, peer: str, deadline_s: float) -> InProcessConnection:
        if peer in self._outgoing:
            return self._outgoing[peer]
        receiver = self._network.transports.get(peer)
        if receiver is None:
            raise PeerUnreachable(f"nobody is at {peer!r} in this process: {sorted(self._network.transports)}")
        connection = self._outgoing[peer] = InProcessConnection(self, receiver)
        receiver._incoming[connection.id] = connection
        self.stats.connections_opened += 1
        return connection

    def expect(self, nonce: int, listener: ArrivalListener) -> None:
        self._demultiplexer.expect(nonce, listener)

    def forget(self, nonce: int) -> None:
        self._demultiplexer.forget(nonce)

    def hasten(self, nonce: int, deadline_s: float) -> None:
        """Sends; a receive is over at once here."""
        for connection in self._outgoing.values():
            connection.hasten(nonce, deadline_s)

    def watch(self, connection_id: int, on_lost: Watcher) -> Callable[[], None]:
        connection = self._incoming.get(connection_id)
        if connection is None:
            asyncio.get_running_loop().call_soon(on_lost, f"connection {connection_id:#x} is gone")
            return lambda: None
        return connection.watch(on_lost)

    def announce(self, arrival: InProcessArrival) -> None:
        listener = self._demultiplexer.destination(arrival.tag)
        if listener is None:
            self.stats.dropped_parts += 1
            self.stats.dropped_bytes += arrival.num_bytes
            arrival.drop()
        else:
            self.stats.received_parts += 1
            self.stats.received_bytes += arrival.num_bytes
            listener.announced(arrival)

    def disconnected(self, connection: InProcessConnection) -> None:
        self.stats.connections_lost += 1
        self._incoming.pop(connection.id, None)
        self._outgoing = {peer: other for peer, other in self._outgoing.items() if other is not connection}

    def describe(self) -> dict[str, str]:
        return {"transport": "in-process", "address": self.address}

    async def close(self) -> None:
        self._network.transports.pop(self.address, None)
        for connection in [*self._outgoing.values(), *self._incoming.values()]:
            connection.lose(f"{self.address} closed")
