"""Connections over loopback that pass a limit: how they end, and that others are served meanwhile."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest import mock

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from router.http.connections import Connections
from router.http.limits import HttpLimits
from router.http.protocol import MAX_PIPELINED, BoundedHttpProtocol
from router.text.tokens import ModelTokens
from tests.support.loop_clock import leap
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import Running, StartRouter

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LIMIT_S = 60.0
ANSWERED = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
async def start(start_router: StartRouter, tokens: ModelTokens) -> Any:
    async def started(**settings: object) -> Running:
        return await start_router(fake_cluster(tokens.encode("a")), **settings)

    return started


@asynccontextmanager
async def connection(running: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = httpx.URL(running.server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def reply_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Status and error of the one answer on a connection; (0, {}) if it was closed without one."""
    async with asyncio.timeout(PATIENCE_S):
        data = await reader.read()
    if not data:
        return 0, {}
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def begun(running: Running, num_silent: int = 0) -> None:
    """Returns once a head has begun on one connection, and so many others have sent nothing."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            connections = running.server._http.server_state.connections
            heads = [each._head_bytes if each._reading_head else 0 for each in connections]
            if (len(heads) - heads.count(0), heads.count(0)) == (1, num_silent):
                return
            await asyncio.sleep(0.01)


async def counted(running: Running, status: int, code: str) -> None:
    """Waits until the metric has a refusal that reached no route."""
    line = f'headrace_http_responses_total{{code="{code}",route="",status="{status}"}} 1.0'
    async with asyncio.timeout(PATIENCE_S):
        while line not in (await running.http.get("/metrics")).text.splitlines():
            await asyncio.sleep(0.01)


async def test_headers_without_end_are_refused_before_they_are_kept(start: Any):
    running = await start()
    async with connection(running) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        line = b"x-%04d: " + b"a" * 8000 + b"\r\n"
        for number in range(9):
            writer.write(line % number)
        status, error = await reply_of(reader)
    assert (status, error["code"]) == (431, "headers_too_large")
    assert "(max_header_bytes)" in error["message"]
    await counted(running, 431, "headers_too_large")
    assert (await running.http.get("/health")).status_code == 200


async def test_one_header_in_pieces_is_refused_as_well(start: Any):
    running = await start()
    async with connection(running) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nx: ")
        writer.write(b"a" * (70 << 10))
        assert (await reply_of(reader))[0] == 431


async def test_headers_up_to_the_limit_are_served(start: Any):
    running = await start(max_header_bytes=20_000)
    assert (await running.http.get("/health", headers={"x": "a" * 19_000})).status_code == 200
    assert (await running.http.get("/health", headers={"x": "a" * 20_000})).status_code == 431


async def test_trailers_count_as_headers(start: Any):
    running = await start()
    async with connection(running) as (reader, writer):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        writer.write(b"".join(b"x-%04d: " % number + b"a" * 8000 + b"\r\n" for number in range(12)))
        assert await reply_of(reader) == (0, {})  # cut off: the application waits for the end of the body
    assert (await running.http.get("/health")).status_code == 200


async def test_headers_that_come_too_slowly_are_refused(start: Any):
    running = await start(header_timeout_s=LIMIT_S)
    async with connection(running) as (reader, writer), connection(running) as (silent, _):
        writer.write(b"GET /health HTTP/1.1\r\n")
        await begun(running, num_silent=1)
        leap(LIMIT_S)
        assert (await reply_of(reader))[1]["code"] == "header_timeout"
        assert await reply_of(silent) == (0, {})
    await counted(running, 408, "header_timeout")


async def test_the_next_requests_headers_have_the_same_limits(start: Any):
    running = await start(header_timeout_s=LIMIT_S, idle_timeout_s=PATIENCE_S)
    async with connection(running) as (reader, writer):
        writer.write(ANSWERED)
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b'{"status":"ok"}')
        writer.write(b"GET /he")
        await begun(running)
        leap(LIMIT_S)
        assert (await reply_of(reader))[0] == 408


async def test_requests_that_wait_for_answers_on_one_connection_are_bounded(start: Any):
    running = await start()
    async with connection(running) as (reader, writer):
        writer.write(ANSWERED * MAX_PIPELINED)
        async with asyncio.timeout(PATIENCE_S):
            answered = await reader.readuntil(b"200 OK")
            while answered.count(b"200 OK") < MAX_PIPELINED:
                answered += await reader.readuntil(b"200 OK")
    async with connection(running) as (reader, writer):
        writer.write(ANSWERED * 10_000)
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionResetError):
                assert (await reader.read()).count(b"200 OK") <= MAX_PIPELINED + 1
    await counted(running, 429, "too_many_pipelined")


async def test_a_body_that_comes_too_slowly_is_refused(start: Any):
    running = await start(body_timeout_s=0.2)
    async with connection(running) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n{")
        assert (await reply_of(reader))[1]["code"] == "body_timeout"  # and the connection ends, too


async def test_the_rest_of_a_refused_body_is_not_awaited_for_ever(start: Any):
    running = await start(max_body_bytes=100, body_timeout_s=0.2)
    async with connection(running) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n{")
        assert (await reply_of(reader))[0] == 413


async def test_unfinished_bodies_share_a_budget(start: Any):
    running = await start(max_body_bytes=50_000, max_bodies_bytes=100_000, max_bodies_bytes_per_client=None)
    body = b"Content-Length: 50000\r\n\r\n" + b" " * 49_000
    async with connection(running) as (first, one), connection(running) as (second, two):
        for writer in (one, two):
            writer.write(HEAD + body)
        refused = await running.http.post("/v1/completions", content=b" " * 40_000)
        while refused.status_code == 400:  # the unfinished ones have not arrived yet
            refused = await running.http.post("/v1/completions", content=b" " * 40_000)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "max_bodies_bytes is 100000" in refused.json()["error"]["message"]
        for reader, writer in ((first, one), (second, two)):
            writer.write(b" " * 1000)
            assert b" 400 " in await reader.readline()
    assert (await running.http.post("/v1/completions", content=b" " * 40_000)).status_code == 400


async def test_small_bodies_pass_beside_slow_uploads_that_hold_the_whole_budget(start: Any):
    running = await start(
        max_body_bytes=400_000, max_bodies_bytes=400_000, max_bodies_bytes_per_client=400_000, client_header="x-tenant"
    )
    async with connection(running) as (_, writer):
        writer.write(HEAD + b"x-tenant: slow\r\nContent-Length: 399900\r\n\r\n" + b" " * 399_800)
        large, small = ({"content": b" " * count, "headers": {"x-tenant": "other"}} for count in (1000, 300))
        async with asyncio.timeout(PATIENCE_S):
            while (refused := await running.http.post("/v1/completions", **large)).status_code == 400:
                pass
        assert refused.json()["error"]["code"] == "too_many_body_bytes"
        assert (await running.http.post("/v1/completions", **small)).status_code == 400  # read, and found to be empty


async def test_one_client_has_a_smaller_budget_for_bodies(start: Any):
    running = await start(max_body_bytes=50_000, max_bodies_bytes=200_000, max_bodies_bytes_per_client=50_000)
    async with connection(running) as (_, writer):
        writer.write(HEAD + b"Content-Length: 50000\r\n\r\n" + b" " * 40_000)
        async with asyncio.timeout(PATIENCE_S):
            while (refused := await running.http.post("/v1/completions", content=b" " * 20_000)).status_code == 400:
                pass
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_body_bytes")


@pytest.mark.parametrize(
    ("settings", "status", "setting"),
    [
        ({"max_connections": 3, "max_connections_per_client": None}, 503, "max_connections is 3"),
        ({"max_connections": 9, "max_connections_per_client": 3}, 429, "max_connections_per_client is 3"),
    ],
)
async def test_connections_beyond_the_limit_are_refused_until_others_close(
    start: Any, settings: dict[str, Any], status: int, setting: str
):
    running = await start(**settings)
    assert (await running.http.get("/health")).status_code == 200  # one stays open
    async with connection(running), connection(running):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with connection(running) as (reader, _):
                    answer, error = await reply_of(reader)
                    if answer == status:
                        break
        assert setting in error["message"]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with connection(running) as (reader, writer):
                writer.write(ANSWERED)
                if b" 200 " in await reader.readline():
                    break


async def test_idle_connections_of_one_address_do_not_keep_out_anothers_first(start: Any):
    """Three addresses that ask for /health now and then could hold all connections for ever."""
    running = await start(max_connections=4, idle_timeout_s=PATIENCE_S, header_timeout_s=PATIENCE_S)
    url = httpx.URL(running.server.url)
    others = [await asyncio.open_connection(url.host, url.port, local_addr=("127.0.0.2", 0)) for _ in range(4)]
    for reader, writer in others[:3]:
        writer.write(ANSWERED)
        assert b" 200 " in await reader.readline()
    async with asyncio.timeout(PATIENCE_S):
        assert (await running.http.get("/health")).status_code == 200
        oldest, _ = others[0]
        await oldest.read()  # to its end
    await counted(running, 503, "connection_gave_way")
    _, writer = others[1]
    assert not writer.is_closing()
    for _, writer in others:
        writer.transport.abort()


async def test_input_that_is_no_http_is_400_in_openais_shape(start: Any, caplog: pytest.LogCaptureFixture):
    running = await start()
    async with connection(running) as (reader, writer):
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert (await reply_of(reader))[1]["code"] == "invalid_http"
    await counted(running, 400, "invalid_http")
    assert not caplog.records


async def test_a_client_that_reads_no_answer_is_cut_off(start: Any):
    running = await start(unread_timeout_s=0.3)
    async with connection(running) as (_, writer):
        writer.transport.pause_reading()
        cut_off = 'headrace_http_responses_total{code="answer_not_read",route="",status="499"} 1.0'
        answered, metrics = 0, ""
        async with asyncio.timeout(PATIENCE_S):
            while cut_off not in metrics:  # one after the other, until they fill the kernel's buffers
                if f'route="/openapi.json",status="200"}} {answered}.0' in metrics or not answered:
                    writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
                    answered += 1
                metrics = (await running.http.get("/metrics")).text


class FakeTransport(asyncio.Transport):
    """A transport whose client takes what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = 0
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        pass


class FakeLoop:
    """Keeps the timers that are set."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Any]] = []

    def call_later(self, delay_s: float, then: Any) -> Any:
        self.timers.append((delay_s, then))
        return mock.Mock()

    def fire(self) -> float:
        delay_s, then = self.timers.pop()
        then()
        return delay_s


async def no_app(scope: Any, receive: Any, send: Any) -> None:
    """Never called."""


def test_a_client_that_reads_slowly_keeps_its_connection_until_it_stops():
    loop, transport, counts = FakeLoop(), FakeTransport(), Counter[str]()
    connections = Connections(HttpLimits())
    protocol = BoundedHttpProtocol(
        uvicorn.Config(no_app, ws="none"), ServerState(), {}, loop,  # type: ignore[arg-type]
        limits=HttpLimits(unread_timeout_s=7.0), connections=connections,
        count=lambda route, status, code: counts.update([code]),
    )  # fmt: skip
    protocol.connection_made(transport)
    transport.unread = 100
    protocol.pause_writing()
    for unread in (99, 50, 10):
        transport.unread = unread
        assert loop.fire() == 7.0
    assert not transport.is_aborted
    loop.fire()
    assert transport.is_aborted
    assert counts == {"answer_not_read": 1}
    protocol.connection_lost(None)
    assert len(connections) == 0


async def test_a_head_that_begins_in_time_is_not_cut_off_by_the_idle_limit(start: Any):
    running = await start(idle_timeout_s=LIMIT_S, header_timeout_s=PATIENCE_S)
    async with connection(running) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        assert b"405" in await reader.readline()  # its body is wanted by nobody
        writer.write(b"body" + ANSWERED[:10])
        (served,) = running.server._http.server_state.connections
        while not served._reading_head or served._timer is served._idle_timer:
            await asyncio.sleep(0.01)
        leap(LIMIT_S)
        writer.write(ANSWERED[10:])
        while b"200 OK" not in (line := await reader.readline()):
            assert line, "the connection was closed"
