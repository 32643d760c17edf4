"""The two ports of a router."""

import socket

import pytest

from headrace.wire.server import ListenError
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import StartRouter


async def test_clients_can_connect_as_soon_as_the_start_returns(start_router: StartRouter):
    """Both ports accept connections before the event loop runs the HTTP server."""
    running = await start_router(fake_cluster([1]), register=False)
    for address in (running.server.url, running.server.control_address):
        host, _, port = address.rpartition(":")
        socket.create_connection((host.removeprefix("http://"), int(port)), timeout=PATIENCE_S).close()


async def test_a_taken_port_is_a_clear_error(start_router: StartRouter):
    running = await start_router(fake_cluster([1]))
    port = int(running.server.url.rsplit(":", 1)[1])
    with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{port}"):
        await start_router(fake_cluster([1]), port=port)
    control_port = int(running.server.control_address.rsplit(":", 1)[1])
    with pytest.raises(ListenError, match=f"{control_port}: is the port taken"):
        await start_router(fake_cluster([1]), control_port=control_port)
