"""Registration of nodes over gRPC."""

import asyncio
from dataclasses import replace

import pytest

from headrace.wire.client import RegistryClient
from headrace.wire.errors import RequestRefused
from headrace.wire.node_messages import Peer, RegisterReply, Role
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


async def test_registration_returns_the_peers_to_send_to(start_router: StartRouter):
    running = await start_router(fake_cluster([1]), register=False, heartbeat_s=3.0)
    registry = RegistryClient(running.server.control_address)
    decode = node_info("d0", Role.DECODE, device="cuda", incarnation=7)
    assert await registry.register(decode, node_status(), timeout_s=PATIENCE_S) == RegisterReply(3.0)
    answer = await registry.register(node_info("p0", Role.PREFILL), node_status(), timeout_s=PATIENCE_S)
    assert answer.peers == (Peer("d0", 7, "d0:2", "cuda"),)
    answer = await registry.register(decode, node_status(), timeout_s=PATIENCE_S)
    assert answer.peers == (Peer("p0", 1, "p0:2", "cpu"),)
    await registry.close()


async def test_registration_returns_the_orphans_to_give_up(start_router: StartRouter):
    running = await start_router(fake_cluster([1]), register=False)
    registry = RegistryClient(running.server.control_address)
    info = node_info("d0", Role.DECODE, incarnation=7)
    status = replace(node_status(), orphans=("mine", "of another router"))
    running.server.nodes.left.add(("d0", 7), "mine")
    assert (await registry.register(info, status, timeout_s=PATIENCE_S)).abandoned == ("mine",)
    assert (await registry.register(info, node_status(), timeout_s=PATIENCE_S)).abandoned == ()
    await registry.close()


async def test_another_layout_is_refused_over_the_wire(start_router: StartRouter):
    running = await start_router(fake_cluster([1]), register=False)
    registry = RegistryClient(running.server.control_address)
    await registry.register(node_info("p0", Role.PREFILL), node_status(), timeout_s=PATIENCE_S)
    groups = (replace(LAYOUT.attention_groups[0], head_dim=16),)
    other = node_info("d0", Role.DECODE, layout=replace(LAYOUT, attention_groups=groups))
    with pytest.raises(RequestRefused, match="attention group 0: head_dim 16 != 8 of p0"):
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
    running.cluster.nodes["d0"].answers = None
    async with asyncio.timeout(PATIENCE_S):
        while (await running.http.get("/cluster")).json()["nodes"]:
            await asyncio.sleep(0.02)
        while not running.cluster.nodes["d0"].closed:
            await asyncio.sleep(0.02)
