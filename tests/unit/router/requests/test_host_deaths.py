"""Hosts that may be dying, and the requests that nodes were lost with."""

import asyncio
from dataclasses import replace

import pytest

from headrace.wire.errors import NodeCrashed, NodeLost, NodeStopped
from headrace.wire.node_messages import Role
from router.requests import host_deaths
from router.requests.host_deaths import HOST_DEATH_S, HostDeaths
from tests.support.patience import PATIENCE_S
from tests.support.router.candidates import AlwaysTheFirst
from tests.support.router.fake_nodes import FakeCluster, Fault, fake_cluster, node_info, node_status
from tests.unit.router.conftest import Running, StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, assert_idle, text_of

HERE, THERE = (node_info(f"on {host}", Role.PREFILL, host_id=host) for host in ("here", "there"))
ANYWHERE = node_info("anywhere", Role.PREFILL)
SHORT_S, FOR_EVER_S = 0.2, 1e9


def lost(name: str, kind: type[NodeLost] = NodeLost) -> Fault:
    return Fault(kind(name, "gone"), is_computing=True)


def test_other_nodes_of_a_host_may_follow_the_lost_one_for_a_while():
    deaths = HostDeaths()
    assert not deaths.may_include(HERE, 10.0)
    deaths.node_lost(HERE, 10.0)
    assert deaths.may_include(HERE, 10.0 + 0.9 * HOST_DEATH_S)
    assert not deaths.may_include(THERE, 10.0)
    assert not deaths.may_include(HERE, 10.0 + HOST_DEATH_S)


def test_each_further_loss_begins_the_time_anew():
    deaths = HostDeaths()
    deaths.node_lost(HERE, 10.0)
    deaths.node_lost(HERE, 10.0 + 0.9 * HOST_DEATH_S)
    assert deaths.may_include(HERE, 10.0 + 1.8 * HOST_DEATH_S)


def test_a_node_that_does_not_say_where_it_runs_dies_alone():
    deaths = HostDeaths()
    deaths.node_lost(ANYWHERE, 10.0)
    assert not deaths.may_include(ANYWHERE, 10.0)


def test_a_node_that_lives_is_no_sign_of_a_dying_host():
    deaths = HostDeaths()
    other = replace(HERE, name="another one here")
    deaths.node_lost(HERE, 10.0)
    deaths.node_lost(other, 11.0)
    assert deaths.lost_nodes(11.0) == [(HERE.name, 1), (other.name, 1)]
    deaths.node_lives((other.name, 1))
    assert deaths.may_include(other, 11.0) and deaths.lost_nodes(11.0) == [(HERE.name, 1)]
    assert deaths.lost_nodes(10.0 + HOST_DEATH_S) == []
    deaths.node_lives((HERE.name, 1))
    assert not deaths.may_include(HERE, 11.0)


async def start(start_router: StartRouter, cluster: FakeCluster, hosts: dict[str, str]) -> Running:
    running = await start_router(cluster, register=False, policy=AlwaysTheFirst())
    for info in cluster.infos():
        running.server.nodes.register(replace(info, host_id=hosts.get(info.name, "")), node_status())
    return running


async def test_a_request_that_was_lost_with_a_node_goes_on_on_another_host(
    start_router: StartRouter, answer: list[int]
):
    """Its raylet takes p1 with it 20 ms later: p1 would have begun to compute, and counted as a second loss."""
    cluster = fake_cluster(answer, prefill=3, eos_id=0)
    cluster.nodes["p0"].faults, cluster.nodes["p1"].faults = [lost("p0")], [lost("p1")]
    running = await start(start_router, cluster, {"p0": "a", "p1": "a", "p2": "b"})
    result = await ask(running)
    assert (text_of(result), result["usage"]["headrace"]["prefill"]["node"]) == (TEXT, "p2")
    assert cluster.nodes["p1"].requests == []


async def test_without_another_host_it_waits_until_nodes_have_outlived_the_lost_one(
    start_router: StartRouter, answer: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_deaths, "HOST_DEATH_S", SHORT_S)
    cluster = fake_cluster(answer, prefill=2, eos_id=0)
    cluster.nodes["p0"].faults = [lost("p0")]
    hosts = {"p0": "a", "p1": "a", "d0": "b"}
    running = await start(start_router, cluster, hosts)
    clock = asyncio.get_running_loop().time
    began_s = clock()
    result = await ask(running)
    assert (text_of(result), result["usage"]["headrace"]["prefill"]["node"]) == (TEXT, "p1")
    assert clock() - began_s >= SHORT_S


@pytest.mark.parametrize("max_tokens", [1, 4])
async def test_it_waits_no_longer_once_the_lost_node_answers(
    start_router: StartRouter, answer: list[int], monkeypatch: pytest.MonkeyPatch, max_tokens: int
):
    """A node that was stopped goes on: the host lives. A single token needs no decode node, and is placed anew."""
    monkeypatch.setattr(host_deaths, "HOST_DEATH_S", FOR_EVER_S)
    cluster = fake_cluster(answer, prefill=2)
    p0 = cluster.nodes["p0"]
    p0.faults = [Fault(NodeLost("p0", "ping timeout"), is_computing=True, is_outlived=True)]
    p0.answers = asyncio.Event()
    running = await start(start_router, cluster, dict.fromkeys(cluster.nodes, "a"))
    asking = asyncio.create_task(ask(running, max_tokens=max_tokens))
    async with asyncio.timeout(PATIENCE_S):
        while not p0.num_questions:
            await asyncio.sleep(0.01)
        assert cluster.nodes["p1"].requests == []
        p0.answers.set()
        result = await asking
    assert result["usage"]["headrace"]["prefill"]["node"] == "p1"
    await assert_idle(running)


async def test_after_the_wait_for_its_host_the_lost_node_is_still_avoided(
    start_router: StartRouter, answer: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_deaths, "HOST_DEATH_S", SHORT_S)
    cluster = fake_cluster(answer, prefill=2, eos_id=0)
    p0 = cluster.nodes["p0"]
    p0.faults, p0.answers = [lost("p0")], None
    running = await start(start_router, cluster, dict.fromkeys(cluster.nodes, "a"))
    asking = asyncio.create_task(ask(running))
    async with asyncio.timeout(PATIENCE_S):
        while not p0.num_questions:
            await asyncio.sleep(0.01)
        running.server.nodes.register(node_info("p0", Role.PREFILL, host_id="a"), node_status())  # a heartbeat
        result = await asking
    assert (text_of(result), result["usage"]["headrace"]["prefill"]["node"]) == (TEXT, "p1")


async def test_nothing_is_sent_to_a_receiver_that_may_be_dying_with_its_host(
    start_router: StartRouter, answer: list[int], monkeypatch: pytest.MonkeyPatch
):
    """What has landed there is computed at once: the receiver's end would count as a second loss."""
    monkeypatch.setattr(host_deaths, "HOST_DEATH_S", SHORT_S)
    cluster = fake_cluster(answer, prefill=2, eos_id=0)
    cluster.nodes["p0"].faults = [lost("p0")]
    running = await start(start_router, cluster, {"p0": "a", "p1": "b", "d0": "a"})
    clock = asyncio.get_running_loop().time
    began_s = clock()
    assert text_of(await ask(running)) == TEXT
    assert clock() - began_s >= SHORT_S


async def test_a_request_that_ends_nodes_costs_two_of_one_host(
    start_router: StartRouter, answer: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_deaths, "HOST_DEATH_S", SHORT_S)
    cluster = fake_cluster(answer, prefill=3, eos_id=0)
    for name in ("p0", "p1", "p2"):
        cluster.nodes[name].faults = [lost(name)]
    running = await start(start_router, cluster, dict.fromkeys(("p0", "p1", "p2", "d0"), "a"))
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "node_crashed")
    assert cluster.nodes["p2"].requests == []
    await assert_idle(running)


async def test_a_node_that_says_why_it_ends_takes_nothing_else_with_it(
    start_router: StartRouter, answer: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_deaths, "HOST_DEATH_S", FOR_EVER_S)
    cluster = fake_cluster(answer, prefill=3, eos_id=0)
    cluster.nodes["p0"].faults, cluster.nodes["p1"].faults = [lost("p0", NodeStopped)], [lost("p1", NodeCrashed)]
    running = await start(start_router, cluster, dict.fromkeys(("p0", "p1", "p2", "d0"), "a"))
    result = await ask(running)
    assert (text_of(result), result["usage"]["headrace"]["prefill"]["node"]) == (TEXT, "p2")


async def test_a_request_that_has_cost_nothing_prefers_other_hosts_and_waits_for_none(
    start_router: StartRouter, answer: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Its tokens came from the lost node, so it is not what ended that."""
    monkeypatch.setattr(host_deaths, "HOST_DEATH_S", FOR_EVER_S)
    cluster = fake_cluster(answer, decode=3, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeLost("d0", "gone"), 3)]
    cluster.nodes["d2"].faults = [Fault(NodeLost("d2", "gone"), 3)]
    running = await start(start_router, cluster, {"d0": "a", "d1": "a", "d2": "b", "p0": "b"})
    result = await ask(running)
    assert (text_of(result), result["usage"]["headrace"]["decode"]["node"]) == (TEXT, "d1")
    assert [len(cluster.nodes[name].requests) for name in ("d0", "d2", "d1")] == [1, 1, 1]
