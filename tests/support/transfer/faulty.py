"""A transport that misbehaves on purpose: what scenarios 12-15 ask of a receiver, without a network.

    transport = FaultyTransport(InProcessTransport(network, "d0"), flip_bit(at=Tag(nonce, 1, True)))

Faults act on the receiving side, between the wrapped transport and the listener, one part at a time.
"""

import asyncio
from collections.abc import Callable

from transfer.backend import Arrival, ArrivalListener, Connection, Transport
from transfer.buffers import Buffer
from transfer.protocol.envelope import Tag
from transfer.protocol.stats import TransportStats

Deliver = Callable[[Arrival], None]
Fault = Callable[[Arrival, Deliver], None]
"""Given a part, deliver it, or something else, or nothing; now or later."""


class FaultyTransport:
    """`inner`, with `fault` between it and every listener."""

    def __init__(self, inner: Transport, fault: Fault) -> None:
        self._inner = inner
        self._fault = fault

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def stats(self) -> TransportStats:
        return self._inner.stats

    async def connect(self, peer: str, deadline_s: float) -> Connection:
        return await self._inner.connect(peer, deadline_s)

    def expect(self, nonce: int, listener: ArrivalListener) -> None:
        self._inner.expect(nonce, _FaultyInbox(listener, self._fault))

    def forget(self, nonce: int) -> None:
        self._inner.forget(nonce)

    def hasten(self, nonce: int, deadline_s: float) -> None:
        self._inner.hasten(nonce, deadline_s)

    def watch(self, connection_id: int, on_lost: Callable[[str], None]) -> Callable[[], None]:
        return self._inner.watch(connection_id, on_lost)

    def describe(self) -> dict[str, str]:
        return self._inner.describe() | {"faulty": repr(self._fault)}

    async def close(self) -> None:
        await self._inner.close()


class _FaultyInbox:
    def __init__(self, listener: ArrivalListener, fault: Fault) -> None:
        self._inbox = listener
        self._fault = fault

    def announced(self, arrival: Arrival) -> None:
        self._fault(arrival, self._inbox.announced)


class _Altered:
    """An arrival whose bytes are changed once received, or that claims another length."""

    def __init__(self, inner: Arrival, alter: Callable[[Buffer], None], num_bytes: int | None = None) -> None:
        self.tag = inner.tag
        self.num_bytes = inner.num_bytes if num_bytes is None else num_bytes
        self._inner = inner
        self._alter = alter

    def receive(self, buffer: Buffer, deadline_s: float, connection_id: int | None) -> asyncio.Future[None]:
        received = self._inner.receive(buffer, deadline_s, connection_id)
        altered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def pass_on(done: asyncio.Future[None]) -> None:
            error = done.exception()
            if error is not None:
                altered.set_exception(error)
            else:
                self._alter(buffer)
                altered.set_result(None)

        received.add_done_callback(pass_on)
        return altered

    def drop(self) -> None:
        self._inner.drop()


class _Replayed:
    """A second delivery of bytes that were received once already."""

    def __init__(self, tag: Tag, data: Buffer) -> None:
        self.tag = tag
        self.num_bytes = len(data)
        self._data = data

    def receive(self, buffer: Buffer, deadline_s: float, connection_id: int | None) -> asyncio.Future[None]:
        buffer[: self.num_bytes] = self._data
        received: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        received.set_result(None)
        return received

    def drop(self) -> None:
        """Nothing waits for it."""


def flip_bit(at: Tag, byte: int = 0) -> Fault:
    """One bit of one part arrives wrong."""
    return flip_chosen(lambda part: byte if part.tag == at else None)


def flip_chosen(byte_of: Callable[[Arrival], int | None]) -> Fault:
    """The lowest bit of that byte of each part for which one is named arrives wrong."""

    def flip(part: Arrival, deliver: Deliver) -> None:
        byte = byte_of(part)
        deliver(part if byte is None else _Altered(part, lambda buffer: _flip(buffer, byte)))

    return flip


def _flip(buffer: Buffer, byte: int) -> None:
    buffer[byte] ^= 1


def truncate(at: Tag) -> Fault:
    """One part arrives a byte short."""

    def shortened(part: Arrival, deliver: Deliver) -> None:
        deliver(_Altered(part, lambda _: None, part.num_bytes - 1) if part.tag == at else part)

    return shortened


def lose(at: Tag) -> Fault:
    """One part never arrives, though its sender is told that it did."""
    return lambda part, deliver: part.drop() if part.tag == at else deliver(part)


def duplicate(at: Tag) -> Fault:
    """One part arrives a second time, right after it was received."""

    def twice(part: Arrival, deliver: Deliver) -> None:
        if part.tag != at:
            deliver(part)
            return
        deliver(_Altered(part, lambda data: deliver(_Replayed(at, data.copy()))))

    return twice


def swap_with_next(at: Tag) -> Fault:
    """One part arrives after the one behind it."""
    held: list[Arrival] = []

    def swapped(part: Arrival, deliver: Deliver) -> None:
        if part.tag == at:
            held.append(part)
            return
        deliver(part)
        while held:
            deliver(held.pop())

    return swapped


class Hold:
    """One part, and its session's later ones, arrive at `release`. `holding` is set at the first."""

    def __init__(self, at: Tag) -> None:
        self.holding = asyncio.Event()
        self._at = at
        self._held: list[tuple[Arrival, Deliver]] = []
        self._released = False

    def __call__(self, part: Arrival, deliver: Deliver) -> None:
        behind = bool(self._held) and part.tag.nonce == self._at.nonce
        if not self._released and (part.tag == self._at or behind):
            self._held.append((part, deliver))
            self.holding.set()
        else:
            deliver(part)

    def release(self) -> None:
        self._released = True
        for part, deliver in self._held:
            deliver(part)
        self._held.clear()
