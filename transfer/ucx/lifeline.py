"""A plain TCP connection beside each UCX connection: is there still a way to the peer's host?

UCX 1.21 notices nothing of a network that falls silent: it has no setting for TCP_USER_TIMEOUT, and without that the
kernel tries for a quarter of an hour. So both ends of a lifeline say a byte now and then, and the kernel gives it up
when what was said stays unacknowledged for `silence_s`. It is the peer's kernel that acknowledges: a peer that is
stopped, or computes, or sits behind a long message, is not taken for lost.

    connecting end                        accepting end
    connects to the peer's address        the door
    says the connection's id    --->
                                <---      says the port of its UCX listener
    a byte every BEAT_S         <-->      a byte every BEAT_S

It comes before the UCX connection: a host out of reach is known as soon, too, and an id has one owner, whoever else
learns of it. Its orderly end means nothing: UCX tells of a peer's end itself, behind all that it sent.
"""

import asyncio
import socket
from typing import cast

ID_BYTES = 8
PORT_BYTES = 2
BEAT_S = 0.25
REACH_TIMEOUT_S = 1.5
"""For the peer's kernel to answer: it is asked again after a second."""
GREETING_TIMEOUT_S = 5.0
"""For the peer's process to take its turn; its kernel has answered by then."""


class Lifeline(asyncio.Protocol):
    """One end.

    greeting   the first `greeting_bytes` that the other end says; fails with `ConnectionError` if it never does
    ended      what became of it: None if it was closed, at either end; else why: the other end may be out of reach
    """

    def __init__(self, silence_s: float, greeting_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.greeting: asyncio.Future[bytes] = self._loop.create_future()
        self.ended: asyncio.Future[str | None] = self._loop.create_future()
        self._silence_s = silence_s
        self._greeting_bytes = greeting_bytes
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's (Ray's loop is one) is no subclass of it
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._silence_s * 1e3))
        self._timer = self._loop.call_later(GREETING_TIMEOUT_S, self._transport.abort)

    def say(self, greeting: bytes) -> None:
        self._transport.write(greeting)

    def close(self) -> None:
        self._transport.abort()

    @property
    def peer_host(self) -> str:
        return str(self._transport.get_extra_info("peername")[0])

    def data_received(self, data: bytes) -> None:
        if self.greeting.done():
            return  # it lives
        self._heard += data
        if len(self._heard) >= self._greeting_bytes:
            self.greeting.set_result(self._heard[: self._greeting_bytes])
            self._timer.cancel()
            self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        self._transport.write(b"\0")
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        reason = None if error is None else f"its lifeline broke, is its host up? {error}"
        self.ended.set_result(reason)
        if not self.greeting.done():
            self.greeting.set_exception(ConnectionError(reason or "it hung up"))
            self.greeting.exception()  # whoever waits for it has it; nobody need


async def reach(host: str, port: int, connection_id: int, silence_s: float) -> tuple[Lifeline, int]:
    """A lifeline to the door at this address, and the port of the UCX listener behind it. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, lifeline = await loop.create_connection(lambda: Lifeline(silence_s, PORT_BYTES), host, port)
    except TimeoutError:
        raise TimeoutError(f"its host did not answer in {REACH_TIMEOUT_S:g} s") from None
    try:
        lifeline.say(connection_id.to_bytes(ID_BYTES))
        return lifeline, int.from_bytes(await lifeline.greeting)
    except BaseException:
        lifeline.close()
        raise


class Door:
    """Takes in the lifelines of peers: the first to name an id has it for as long as it lasts.

    port            0 takes a free one
    listener_port   of UCX, which peers are told
    Raises `OSError` when the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, listener_port: int, silence_s: float) -> None:
        self._listener_port = listener_port
        self._silence_s = silence_s
        self._lifelines: dict[int, Lifeline] = {}
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
        self.port: int = listening.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._opening = loop.create_task(loop.create_server(self._take_in, sock=listening))

    def lifeline(self, connection_id: int) -> Lifeline | None:
        return self._lifelines.get(connection_id)

    async def close(self) -> None:
        """Takes in nobody any more; lifelines without a UCX connection end."""
        (await self._opening).close()
        for lifeline in self._lifelines.values():
            lifeline.close()

    def _take_in(self) -> Lifeline:
        lifeline = Lifeline(self._silence_s, ID_BYTES)
        lifeline.greeting.add_done_callback(lambda greeting: self._greeted(lifeline, greeting))
        return lifeline

    def _greeted(self, lifeline: Lifeline, greeting: asyncio.Future[bytes]) -> None:
        if greeting.exception() is not None:
            return
        connection_id = int.from_bytes(greeting.result())
        if connection_id in self._lifelines:
            lifeline.close()
            return
        self._lifelines[connection_id] = lifeline
        lifeline.ended.add_done_callback(lambda _: self._lifelines.pop(connection_id))
        lifeline.say(self._listener_port.to_bytes(PORT_BYTES))
