"""Nodes register over gRPC, as they do in a cluster; and a node's gRPC errors become the router's."""

import asyncio
import socket
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from headrace.request import Request, Sampling
from headrace.wire.client import GrpcNodeClient, RegistryClient
from headrace.wire.errors import DeadlineExceeded, NodeBusy, NodeError, NodeLost, RequestRefused, TransferBroken
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import Peer, PrefillRequest, RegisterReply, Role, Start, Stop
from headrace.wire.server import ControlServer, ListenError
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import LAYOUT, fake_cluster, node_info, node_status
from tests.unit.router.conftest import StartRouter


async def test_nodes_register_and_leave(start_router: StartRouter):
    running = await start_router(fake_cluster([1]), register=False, heartbeat_s=3.0)
    registry = RegistryClient(running.server.control_address)
    info = node_info("d0", Role.DECODE, incarnation=2**64 - 1)
    assert await registry.register(info, node_status(), timeout_s=PATIENCE_S) == RegisterReply(3.0)
    (node,) = running.server.nodes.live(Role.DECODE)
    assert (node.info, node.status) == (info, node_status())
    await registry.leave("d0", 2**64 - 1, timeout_s=PATIENCE_S)
    assert running.server.nodes.live(Role.DECODE) == []
    await registry.close()


async def test_a_node_is_told_whom_it_may_have_to_send_to(start_router: StartRouter):
    running = await start_router(fake_cluster([1]), register=False, heartbeat_s=3.0)
    registry = RegistryClient(running.server.control_address)
    decode = node_info("d0", Role.DECODE, device="cuda", incarnation=7)
    assert await registry.register(decode, node_status(), timeout_s=PATIENCE_S) == RegisterReply(3.0)
    answer = await registry.register(node_info("p0", Role.PREFILL), node_status(), timeout_s=PATIENCE_S)
    assert answer.peers == (Peer("d0", 7, "d0:2", "cuda"),)
    answer = await registry.register(decode, node_status(), timeout_s=PATIENCE_S)
    assert answer.peers == (Peer("p0", 1, "p0:2", "cpu"),)
    await registry.close()


async def test_another_layout_is_refused_over_the_wire(start_router: StartRouter):
    running = await start_router(fake_cluster([1]), register=False)
    registry = RegistryClient(running.server.control_address)
    await registry.register(node_info("p0", Role.PREFILL), node_status(), timeout_s=PATIENCE_S)
    other = node_info("d0", Role.DECODE, layout=replace(LAYOUT, head_dim=16))
    with pytest.raises(RequestRefused, match="head_dim 16 != 8 of p0"):
        await registry.register(other, node_status(), timeout_s=PATIENCE_S)
    await registry.close()


async def test_a_second_process_of_one_name_is_refused_over_the_wire(start_router: StartRouter):
    running = await start_router(fake_cluster([1]), register=False)
    registry = RegistryClient(running.server.control_address)
    for incarnation in (1, 2):
        await registry.register(
            node_info("p0", Role.PREFILL, incarnation=incarnation), node_status(), timeout_s=PATIENCE_S
        )
    with pytest.raises(RequestRefused, match="the name is taken"):
        await registry.register(node_info("p0", Role.PREFILL), node_status(), timeout_s=PATIENCE_S)
    await registry.close()


async def test_a_silent_node_disappears(start_router: StartRouter):
    running = await start_router(fake_cluster([1], prefill=0), heartbeat_s=0.1, register=False)
    running.register()
    assert [node.info.name for node in running.server.nodes.live(Role.DECODE)] == ["d0"]
    async with asyncio.timeout(PATIENCE_S):
        while (await running.http.get("/cluster")).json()["nodes"]:
            await asyncio.sleep(0.02)
        while not running.cluster.nodes["d0"].closed:
            await asyncio.sleep(0.02)


async def test_who_connects_as_soon_as_it_has_started_is_not_turned_away(start_router: StartRouter):
    """Before the event loop has a turn for its HTTP server: whoever reads the address that a process prints may."""
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


class FailingNode(rpc.PrefillServicer, rpc.DecodeServicer):
    """Ends every call with one status, before it has read anything."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    async def Run(self, request, context):  # type: ignore[no-untyped-def]
        await context.abort(self._code, "the cause")
        yield


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, NodeBusy),
        (grpc.StatusCode.ABORTED, TransferBroken),
        (grpc.StatusCode.INVALID_ARGUMENT, RequestRefused),
        (grpc.StatusCode.FAILED_PRECONDITION, RequestRefused),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.UNAVAILABLE, NodeLost),
        (grpc.StatusCode.UNKNOWN, NodeLost),
    ],
)
async def test_status_codes_become_node_errors(code: grpc.StatusCode, error: type[NodeError]):
    service = FailingNode(code)

    def add(server: grpc.aio.Server) -> None:
        rpc.add_PrefillServicer_to_server(service, server)
        rpc.add_DecodeServicer_to_server(service, server)

    server = ControlServer(["Prefill", "Decode"], add)
    port = await server.start("127.0.0.1", 0)
    client = GrpcNodeClient("n0", f"127.0.0.1:{port}")
    request = Request("r", (1,), 1, Sampling(max_tokens=1, seed=0))
    try:
        with pytest.raises(error, match="n0: the cause"):
            async with client.prefill(PrefillRequest(request), timeout_s=PATIENCE_S) as prefill:
                async for _ in prefill:
                    pass
        call = client.decode(Start(request), timeout_s=PATIENCE_S)
        with pytest.raises(error, match="n0: the cause"):  # on entering it already, if the node was quicker
            async with call as decode:
                async for _ in decode:
                    pass
        with pytest.raises(error, match="n0: the cause"):
            await call.send(Stop())
    finally:
        await client.close()
        await server.stop(0)


async def test_an_unreachable_node_is_lost():
    client = GrpcNodeClient("n0", "127.0.0.1:1")
    request = Request("r", (1,), 1, Sampling(max_tokens=1, seed=0))
    with pytest.raises(NodeLost):
        async with client.decode(Start(request), timeout_s=PATIENCE_S) as call:
            async for _ in call:
                pass
    await client.close()
