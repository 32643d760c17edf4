"""Keepalive: a plain TCP connection beside each UCX connection, which notices when the network falls silent.

UCX 1.21 does not notice that: it has no setting for TCP_USER_TIMEOUT, and without one the kernel retries for a quarter
of an hour. So both ends of a keepalive connection send a byte now and then, and the kernel breaks it when what was
sent stays unacknowledged for `silence_s`. The peer's kernel acknowledges: a peer that is stopped, or busy, or behind a
long message, is not taken for lost.

    connecting end                        accepting end
    connects to the peer's address        KeepaliveServer
    sends the connection's id   --->
                                <---      sends the port of its UCX listener
    a byte every BEAT_S         <-->      a byte every BEAT_S
                                <---      sends CONFIRMATION once the UCX connection is known there by its id

It is made before the UCX connection, so a host out of reach is noticed as soon, and an id belongs to the peer that sent
it first. Its orderly end means nothing: UCX reports a peer's end itself, behind everything that the peer sent.
"""

import asyncio
import socket
from typing import cast

ID_BYTES = 8
PORT_BYTES = 2
BEAT = b"\0"
CONFIRMATION = b"\1"
BEAT_S = 0.25
CONNECT_TIMEOUT_S = 1.5
"""For the peer's kernel to answer; the kernel here repeats its request after a second."""
HANDSHAKE_TIMEOUT_S = 5.0
"""For the peer's process to answer; its kernel has answered by then."""


class Keepalive(asyncio.Protocol):
    """One end of a keepalive connection.

    handshake   the first `handshake_bytes` from the other end; fails with `ConnectionError` if they never come
    confirmed   done once the other end has confirmed the UCX connection; fails with `ConnectionError` if it never does
    ended       None when either end closed the connection; else the reason, and the other host may be out of reach
    """

    def __init__(self, silence_s: float, handshake_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.handshake: asyncio.Future[bytes] = self._loop.create_future()
        self.confirmed: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[str | None] = self._loop.create_future()
        self._silence_s = silence_s
        self._handshake_bytes = handshake_bytes
        self._received = b""

    @classmethod
    async def connect(cls, host: str, port: int, connection_id: int, silence_s: float) -> tuple["Keepalive", int]:
        """Connects to the `KeepaliveServer` there; also returns the port of its UCX listener. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, keepalive = await loop.create_connection(lambda: cls(silence_s, PORT_BYTES), host, port)
        except TimeoutError:
            raise TimeoutError(f"its host did not answer in {CONNECT_TIMEOUT_S:g} s") from None
        try:
            keepalive.send(connection_id.to_bytes(ID_BYTES))
            return keepalive, int.from_bytes(await keepalive.handshake)
        except BaseException:
            keepalive.close()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, as in Ray without a GPU, is no subclass of it
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._silence_s * 1e3))
        self._timer = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._transport.abort)

    def send(self, handshake: bytes) -> None:
        self._transport.write(handshake)

    def confirm(self) -> None:
        """Tells the connecting end that messages over the UCX connection are now taken for its own."""
        self._transport.write(CONFIRMATION)

    def close(self) -> None:
        self._transport.abort()

    @property
    def peer_host(self) -> str:
        return str(self._transport.get_extra_info("peername")[0])

    def data_received(self, data: bytes) -> None:
        if not self.handshake.done():
            self._received += data
            if len(self._received) < self._handshake_bytes:
                return
            data = self._received[self._handshake_bytes :]
            self.handshake.set_result(self._received[: self._handshake_bytes])
            self._timer.cancel()
            self._timer = self._loop.call_later(BEAT_S, self._beat)
        if CONFIRMATION in data and not self.confirmed.done():
            self.confirmed.set_result(None)

    def _beat(self) -> None:
        self._transport.write(BEAT)
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        reason = None if error is None else f"its keepalive connection broke, is its host up? {error}"
        self.ended.set_result(reason)
        for awaited in (self.handshake, self.confirmed):
            if not awaited.done():
                awaited.set_exception(ConnectionError(reason or "it closed the connection"))
                awaited.exception()  # marks it retrieved: nobody need wait for it


class KeepaliveServer:
    """Accepts the keepalive connections of peers. An id belongs to the first that sends it, until that one ends.

    port            0 takes a free one
    listener_port   of UCX, sent to each peer
    Raises `OSError` when the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, listener_port: int, silence_s: float) -> None:
        self._listener_port = listener_port
        self._silence_s = silence_s
        self._keepalives: dict[int, Keepalive] = {}
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
        self.port: int = listening.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._starting = loop.create_task(loop.create_server(self._accept, sock=listening))

    def keepalive(self, connection_id: int) -> Keepalive | None:
        return self._keepalives.get(connection_id)

    async def close(self) -> None:
        """Stops listening and closes the accepted connections."""
        (await self._starting).close()
        for keepalive in self._keepalives.values():
            keepalive.close()

    def _accept(self) -> Keepalive:
        keepalive = Keepalive(self._silence_s, ID_BYTES)
        keepalive.handshake.add_done_callback(lambda handshake: self._identify(keepalive, handshake))
        return keepalive

    def _identify(self, keepalive: Keepalive, handshake: asyncio.Future[bytes]) -> None:
        if handshake.exception() is not None:
            return
        connection_id = int.from_bytes(handshake.result())
        if connection_id in self._keepalives:
            keepalive.close()
            return
        self._keepalives[connection_id] = keepalive
        keepalive.ended.add_done_callback(lambda _: self._keepalives.pop(connection_id))
        keepalive.send(self._listener_port.to_bytes(PORT_BYTES))
