import asyncio
import socket

import pytest

from router.http.limits import HttpLimits
from router.http.server import HttpServer
from tests.support.patience import PATIENCE_S


async def test_small_writes_leave_at_once():
    """Held back until the client's host acknowledges the last one, each answer and each token takes 40 ms more."""
    server = HttpServer(None, HttpLimits(), 1.0, lambda *answer: None)
    port = server.start("127.0.0.1", 0)
    async with asyncio.timeout(PATIENCE_S):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        server.begin_to_stop()
        await server.serving


async def test_its_errors_are_lines_of_the_process_s_log(caplog: pytest.LogCaptureFixture):
    """Handlers of uvicorn's own would print them without the time, and hide them from tests for silence."""

    async def defect(scope: object, receive: object, send: object) -> None:
        raise ZeroDivisionError

    server = HttpServer(defect, HttpLimits(), 1.0, lambda *answer: None)
    port = server.start("127.0.0.1", 0)
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.read(12)).endswith(b"500")
        writer.close()
        server.begin_to_stop()
        await server.serving
    assert "ZeroDivisionError" in caplog.text
