"""Keepalive connections within this process: which the server accepts, and how each end learns of the other's end."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvloop

from tests.support.patience import PATIENCE_S
from transfer.ucx.keepalive import BEAT_S, Keepalive, KeepaliveServer

ID = 0x1234_5678_9ABC_DEF0
LISTENER_PORT = 4711


@pytest.fixture
async def server() -> AsyncIterator[KeepaliveServer]:
    server = KeepaliveServer("127.0.0.1", 0, LISTENER_PORT, silence_s=1.0)
    yield server
    await server.close()


async def test_the_first_peer_to_send_an_id_has_it_and_learns_the_listeners_port(server: KeepaliveServer) -> None:
    keepalive, port = await Keepalive.connect("127.0.0.1", server.port, ID, 1.0)
    assert port == LISTENER_PORT
    assert server.keepalive(ID) is not None and server.keepalive(ID + 1) is None
    with pytest.raises(ConnectionError, match="it closed the connection"):
        await Keepalive.connect("127.0.0.1", server.port, ID, 1.0)
    assert not keepalive.ended.done()
    keepalive.close()


async def test_the_end_of_one_end_is_the_others_and_frees_the_id(server: KeepaliveServer) -> None:
    keepalive, _ = await Keepalive.connect("127.0.0.1", server.port, ID, 1.0)
    other = server.keepalive(ID)
    assert other is not None
    keepalive.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await keepalive.ended is None
        assert await other.ended is None, "UCX itself reports an orderly end"
    again, _ = await Keepalive.connect("127.0.0.1", server.port, ID, 1.0)
    assert server.keepalive(ID) not in (None, other)
    again.close()


async def test_beats_are_not_part_of_the_handshake(server: KeepaliveServer) -> None:
    keepalive, _ = await Keepalive.connect("127.0.0.1", server.port, ID, 1.0)
    await asyncio.sleep(3 * BEAT_S)  # a few of them, both ways
    other = server.keepalive(ID)
    assert other is not None
    assert not keepalive.ended.done() and not other.ended.done()
    assert keepalive.handshake.result() == LISTENER_PORT.to_bytes(2)
    keepalive.close()


async def test_an_address_without_a_server_and_a_silent_server_raise() -> None:
    silent = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(ConnectionError):
        await Keepalive.connect("127.0.0.1", port, ID, 1.0)
    silent.close()
    await silent.wait_closed()
    with pytest.raises(OSError):
        await Keepalive.connect("127.0.0.1", port, ID, 1.0)


async def test_a_port_in_use_raises(server: KeepaliveServer) -> None:
    with pytest.raises(OSError, match="in use"):
        KeepaliveServer("127.0.0.1", server.port, LISTENER_PORT, silence_s=1.0)


def test_a_node_of_ray_without_a_gpu_runs_in_uvloop() -> None:
    async def listener_port() -> int:
        server = KeepaliveServer("127.0.0.1", 0, LISTENER_PORT, silence_s=1.0)
        async with asyncio.timeout(PATIENCE_S):
            keepalive, port = await Keepalive.connect("127.0.0.1", server.port, ID, 1.0)
            keepalive.close()
            await server.close()
        return port

    assert uvloop.run(listener_port()) == LISTENER_PORT
