"""Parts of an answer's body that are written past ASGI, by a server's connection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvloop

from router.http.body_writer import BodyWriter, body_writer_of
from router.http.limits import HttpLimits
from router.http.server import HttpServer
from tests.support.patience import PATIENCE_S

Answer = Callable[[BodyWriter, Callable[[Any], Awaitable[None]]], Awaitable[None]]
PAUSED_BYTES = 1 << 20  # of one part; the sockets between server and client hold some of them


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[int]:
    """The port of a server whose application answers each request so."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        writer = body_writer_of(scope)
        assert writer is not None
        await answer(writer, send)

    server = HttpServer(app, HttpLimits(), 1.0, lambda *answer: None)
    port = server.start("127.0.0.1", 0)
    async with asyncio.timeout(PATIENCE_S):
        yield port
        server.begin_to_stop()
        await server.serving


def start(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": list(headers)}


def part(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def test_parts_lie_between_those_that_are_sent() -> None:
    may: list[bool] = []

    async def answer(writer: BodyWriter, send: Any) -> None:
        may.append(writer.may_write)
        await send(start())
        may.append(writer.may_write)
        writer.write(b"a" * 17)
        await send(part(b"b"))
        writer.write(b"c")
        writer.write(b"d")
        await send(part(b"e", more=False))
        may.append(writer.may_write)

    async with serving(answer) as port, httpx.AsyncClient() as client:
        reply = await client.get(f"http://127.0.0.1:{port}/")
        assert reply.text == "a" * 17 + "bcde"
        assert may == [False, True, False]
        reply = await client.get(f"http://127.0.0.1:{port}/")  # the connection is kept, its framing right
        assert reply.text == "a" * 17 + "bcde"


async def test_a_body_of_known_length_and_that_of_a_head_request_are_sent_alone() -> None:
    may: list[bool] = []

    async def answer(writer: BodyWriter, send: Any) -> None:
        await send(start((b"content-length", b"1")))
        may.append(writer.may_write)
        await send(part(b"a", more=False))

    async def headless(writer: BodyWriter, send: Any) -> None:
        await send(start())
        may.append(writer.may_write)
        await send(part(b"a", more=False))

    async with httpx.AsyncClient() as client:
        async with serving(answer) as port:
            assert (await client.get(f"http://127.0.0.1:{port}/")).text == "a"
        async with serving(headless) as port:
            assert (await client.head(f"http://127.0.0.1:{port}/")).text == ""
    assert may == [False, False]


async def test_nothing_is_written_while_the_client_does_not_read_nor_once_it_has_left() -> None:
    stopped, going_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    num_bytes, may_still = 0, True

    async def answer(writer: BodyWriter, send: Any) -> None:
        nonlocal num_bytes, may_still
        await send(start())
        while writer.may_write:
            writer.write(b"x" * PAUSED_BYTES)
            num_bytes += PAUSED_BYTES
            await asyncio.sleep(0)
        stopped.set()
        await send(part(b"y"))  # waits for the reader
        assert writer.may_write
        going_on.set()
        while writer.may_write:
            await asyncio.sleep(0.01)
        may_still = writer.may_write
        ended.set()

    async with serving(answer) as port:
        reader, client = await asyncio.open_connection("127.0.0.1", port)
        client.transport.pause_reading()
        client.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await stopped.wait()
        client.transport.resume_reading()
        data = await read_until(reader, b"\r\n1\r\ny\r\n")
        assert data.count(b"x") == num_bytes + data.partition(b"\r\n\r\n")[0].count(b"x")
        await going_on.wait()
        client.close()
        await ended.wait()
    assert not may_still


async def read_until(reader: asyncio.StreamReader, end: bytes) -> bytes:
    data = bytearray()
    while not data.endswith(end):
        data += await reader.read(1 << 20)
    return bytes(data)


def test_it_writes_in_the_loop_of_a_routers_process() -> None:
    uvloop.run(test_parts_lie_between_those_that_are_sent())
    uvloop.run(test_nothing_is_written_while_the_client_does_not_read_nor_once_it_has_left())
