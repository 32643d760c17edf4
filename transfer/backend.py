"""The interface of a transport: tagged parts over connections, announced before they are received.

    sender                                          receiver
    connection = await transport.connect(peer)      transport.expect(nonce, listener)
    connection.send(tag, part, deadline_s)   --->   listener.announced(arrival)
                                                    arrival.receive(buffer, ...)  or  arrival.drop()

Contract
- All calls are made in the event loop's thread, and callbacks come in it.
- Parts sent over one connection are announced in the order in which they were sent.
- A part is announced only to the listener that expects its nonce; any other part is dropped and counted.
- An operation owns its buffer until its future is done, whatever its caller does meanwhile: do not cancel the future.
  It is done soon after its deadline at the latest: the transport closes the connection for that.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from transfer.buffers import Buffer
from transfer.protocol.envelope import Tag
from transfer.protocol.stats import TransportStats


class Arrival(Protocol):
    """A part from a peer that waits to be received."""

    @property
    def tag(self) -> Tag: ...

    @property
    def num_bytes(self) -> int: ...

    def receive(self, buffer: Buffer, deadline_s: float, connection_id: int | None) -> asyncio.Future[None]:
        """Receives the part, once, into `buffer`, of at least `num_bytes`.

        connection_id   of the connection that the envelope named, which is closed at the deadline; fails with
                        `ConnectionLost` if there is none. None: no connection is closed, and the transport keeps the
                        buffer even when the future has failed
        The future fails with `ConnectionLost`, `TransferTimeout` or `Truncated`.
        """
        ...

    def drop(self) -> None:
        """Discards the part; to its sender it counts as taken. Does nothing once received or dropped."""
        ...


class ArrivalListener(Protocol):
    """The receiver of one nonce's parts."""

    def announced(self, arrival: Arrival) -> None: ...


class Connection(Protocol):
    """A connection to one peer. Once lost it stays lost; `Transport.connect` makes another."""

    @property
    def id(self) -> int:
        """64 random bits, by which the receiver can watch this connection."""
        ...

    @property
    def lanes(self) -> tuple[str, ...]:
        """The transports and devices in use, such as `tcp/eth0`; final after the first messages."""
        ...

    def send(self, tag: Tag, part: Buffer, deadline_s: float) -> asyncio.Future[None]:
        """Done when the transport no longer needs `part`. Fails with `ConnectionLost` or `TransferTimeout`."""
        ...

    def watch(self, on_lost: Callable[[str], None]) -> Callable[[], None]:
        """Calls `on_lost(reason)` when it is lost, soon if it is already. Returns a function that stops watching."""
        ...


class Transport(Protocol):
    """One process's transport. Times are absolute, on the event loop's clock."""

    @property
    def address(self) -> str:
        """The address that a peer passes to `connect`."""
        ...

    @property
    def stats(self) -> TransportStats: ...

    async def connect(self, peer: str, deadline_s: float) -> Connection:
        """The connection to this peer, made if there is none.

        Raises `PeerUnreachable` or `TransferTimeout`.
        """
        ...

    def expect(self, nonce: int, listener: ArrivalListener) -> None:
        """Announces this nonce's parts to `listener` from now on. Raises `IllegalTransition` if it has a listener."""
        ...

    def forget(self, nonce: int) -> None:
        """Drops this nonce's parts from now on."""
        ...

    def hasten(self, nonce: int, deadline_s: float) -> None:
        """Brings forward to `deadline_s` the later deadlines of this nonce's operations in flight."""
        ...

    def watch(self, connection_id: int, on_lost: Callable[[str], None]) -> Callable[[], None]:
        """`Connection.watch` at the receiving end, by the id in an envelope."""
        ...

    def describe(self) -> dict[str, str]:
        """Settings and lanes in use, for logs and for the operator's page."""
        ...

    async def close(self) -> None:
        """Closes all connections and fails all operations."""
        ...
