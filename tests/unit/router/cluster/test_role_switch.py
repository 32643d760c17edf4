"""Switches of roles over fake nodes."""

import asyncio

import pytest

from headrace.wire.node_messages import Role
from router.cluster.nodes import NodeTable
from router.cluster.role_switch import RoleSwitch
from router.errors import ApiError
from tests.support.router.fake_nodes import FakeCluster, fake_cluster, node_status


@pytest.fixture
def cluster() -> FakeCluster:
    return fake_cluster([1], prefill=1, decode=2)


def registered(cluster: FakeCluster, *, roles_are_fixed: bool = True) -> NodeTable:
    nodes = NodeTable(2.0, lambda: 100.0, cluster.connect, roles_are_fixed=roles_are_fixed)
    for info in cluster.infos():
        nodes.register(info, node_status())
    return nodes


def names(nodes: NodeTable, work: Role) -> list[str]:
    return [node.info.name for node in nodes.live(work)]


async def test_a_switch_reaches_the_node_and_the_table(cluster: FakeCluster):
    nodes = registered(cluster)
    await RoleSwitch(nodes).switch("d1", Role.PREFILL)
    assert cluster.nodes["d1"].switched_to == [Role.PREFILL]
    assert (names(nodes, Role.PREFILL), names(nodes, Role.DECODE)) == (["d1", "p0"], ["d0"])


async def test_an_unknown_node_is_404(cluster: FakeCluster):
    with pytest.raises(ApiError, match="no node 'd9' is registered") as refused:
        await RoleSwitch(registered(cluster)).switch("d9", Role.BOTH)
    assert refused.value.status == 404


async def test_somebody_must_decode_where_roles_are_fixed(cluster: FakeCluster):
    roles = RoleSwitch(nodes := registered(cluster))
    both = (roles.switch(name, Role.PREFILL) for name in ("d0", "d1"))
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert first is None and isinstance(second, ApiError) and second.status == 409
    assert "no other node decodes than d1, and roles are fixed" in str(second)
    assert names(nodes, Role.DECODE) == ["d1"]
    await roles.switch("d1", Role.BOTH)


async def test_elastic_roles_may_all_be_prefill(cluster: FakeCluster):
    roles = RoleSwitch(nodes := registered(cluster, roles_are_fixed=False))
    for name in ("d0", "d1"):
        await roles.switch(name, Role.PREFILL)
    assert {node.role for node in nodes.all()} == {Role.PREFILL}


async def test_a_node_that_does_not_answer_keeps_its_row(cluster: FakeCluster):
    nodes = registered(cluster)
    cluster.nodes["d1"].loses_switches = True
    with pytest.raises(ApiError, match="node d1: nobody is there; its role is what its next heartbeat says") as failed:
        await RoleSwitch(nodes).switch("d1", Role.PREFILL)
    assert (failed.value.status, failed.value.retry_after_s) == (503, 2)
    assert names(nodes, Role.DECODE) == ["d0", "d1"]
