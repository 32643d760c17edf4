"""The small interface that a transport implements: tagged parts over connections, announced before received.

    prefill node                                    decode node
    connection = await transport.connect(peer)      transport.expect(nonce, listener)
    connection.send(tag, part, deadline_s)   --->   listener.announced(arrival)
                                                    arrival.receive(buffer, ...)  or  arrival.drop()

Contract
- All calls are made on the event loop's thread, and callbacks come on it.
- Parts sent over one connection are announced in the order in which they were sent.
- A part is announced only to the listener that expects its nonce; any other is dropped and counted.
- An operation owns its buffer until its future is done, whatever its caller does meanwhile: do not cancel
  the future. It is done soon after its deadline at the latest: a transport closes the connection for that.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from transfer.buffers import Buffer
from transfer.protocol.envelope import Tag
from transfer.protocol.stats import TransportStats


class Arrival(Protocol):
    """A part that a peer sent and that waits to be received."""

    @property
    def tag(self) -> Tag: ...

    @property
    def num_bytes(self) -> int: ...

    def receive(self, buffer: Buffer, deadline_s: float, connection_id: int | None) -> asyncio.Future[None]:
        """Into `buffer`, of at least `num_bytes`; once. Fails: `ConnectionLost`, `TransferTimeout` or `Truncated`.

        connection_id   what the envelope named: the connection to break at the deadline; `ConnectionLost` when there is
                        none such. None: nobody's is broken, and the buffer stays the transport's whatever the future
                        says
        """
        ...

    def drop(self) -> None:
        """Let go of it; the sender is told that it was taken. Does nothing once received or dropped."""
        ...


class ArrivalListener(Protocol):
    def announced(self, arrival: Arrival) -> None: ...


class Connection(Protocol):
    """A way to one peer. Once lost it stays lost; `Transport.connect` makes another."""

    @property
    def id(self) -> int:
        """64 random bits: the name by which the receiver can watch this connection."""
        ...

    @property
    def lanes(self) -> tuple[str, ...]:
        """The transports and devices in use, such as `tcp/eth0`: final once the first messages have gone over it."""
        ...

    def send(self, tag: Tag, part: Buffer, deadline_s: float) -> asyncio.Future[None]:
        """Done when the transport needs `part` no longer. Fails with `ConnectionLost` or `TransferTimeout`."""
        ...

    def watch(self, on_lost: Callable[[str], None]) -> Callable[[], None]:
        """Call `on_lost(reason)` when it is lost, soon if it is already. Returns how to stop watching."""
        ...


class Transport(Protocol):
    """One per process. Times are absolute, on the event loop's clock."""

    @property
    def address(self) -> str:
        """What a peer passes to `connect`."""
        ...

    @property
    def stats(self) -> TransportStats: ...

    async def connect(self, peer: str, deadline_s: float) -> Connection:
        """The live connection to this peer, made when there is none.

        Raises `PeerUnreachable` or `TransferTimeout`.
        """
        ...

    def expect(self, nonce: int, listener: ArrivalListener) -> None:
        """Announce this nonce's parts to `listener` from now on. Raises `IllegalTransition` if one has them."""
        ...

    def forget(self, nonce: int) -> None:
        """Drop this nonce's parts from now on."""
        ...

    def hasten(self, nonce: int, deadline_s: float) -> None:
        """Bring forward to `deadline_s` what this nonce's sends and receives in flight were given, if it is later."""
        ...

    def watch(self, connection_id: int, on_lost: Callable[[str], None]) -> Callable[[], None]:
        """The receiving end's `Connection.watch`, by the id that an envelope names."""
        ...

    def describe(self) -> dict[str, str]:
        """What is in use: for logs, and for the operator's page."""
        ...

    async def close(self) -> None:
        """Lose all connections and fail all operations."""
        ...
