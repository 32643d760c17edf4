"""Nodes whose connection was lost are asked before their request ends for it."""

import asyncio
from dataclasses import replace

import pytest

from headrace.wire.errors import NodeLost
from router.cluster.nodes import NodeTable
from router.requests import inquest
from router.requests.inquest import has_outlived
from tests.support.patience import PATIENCE_S
from tests.support.router.candidates import AlwaysTheFirst
from tests.support.router.fake_nodes import Fault, fake_cluster, node_status
from tests.unit.router.conftest import StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, assert_idle, text_of

LOST = ("p0", 1)


@pytest.fixture
def cluster(answer):
    return fake_cluster(answer, prefill=3, eos_id=0)


@pytest.fixture
def nodes(cluster):
    table = NodeTable(2.0, lambda: 0.0, cluster.connect)
    table.register(cluster.infos()[0], node_status())
    return table


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(inquest, "INQUEST_S", 0.05)
    monkeypatch.setattr(inquest, "ASK_AGAIN_S", 0.001)


async def test_a_node_that_answers_has_outlived_its_loss(nodes) -> None:
    assert await has_outlived(nodes, LOST)


async def test_another_process_in_its_place_is_its_end(nodes, cluster) -> None:
    cluster.nodes["p0"].incarnation = 2
    assert not await has_outlived(nodes, LOST)


async def test_a_successor_that_has_registered_is_its_end(nodes, cluster) -> None:
    assert not await has_outlived(nodes, ("p0", 7))
    assert cluster.nodes["p0"].num_questions == 0


async def test_a_node_that_answers_late_has_outlived_it(nodes, cluster) -> None:
    node = cluster.nodes["p0"]
    node.answers = None
    asking = asyncio.create_task(has_outlived(nodes, LOST))
    async with asyncio.timeout(PATIENCE_S):
        while not node.num_questions:
            await asyncio.sleep(0)
    node.answers = asyncio.Event()
    node.answers.set()
    assert await asking


async def test_a_node_that_was_taken_for_dead_may_register_again(nodes, cluster) -> None:
    nodes.leave(*LOST)
    asking = asyncio.create_task(has_outlived(nodes, LOST))
    await asyncio.sleep(0)
    nodes.register(cluster.infos()[0], node_status())
    assert await asking


@pytest.mark.parametrize("way", ["answers nothing", "refuses", "is gone"])
async def test_a_node_that_proves_nothing_is_dead(nodes, cluster, impatient, way) -> None:
    node = cluster.nodes["p0"]
    node.answers = None if way == "refuses" else asyncio.Event()
    if way == "is gone":
        nodes.leave(*LOST)
    assert not await has_outlived(nodes, LOST)


async def test_an_engine_that_stands_still_has_outlived_nothing(nodes, cluster, impatient, monkeypatch) -> None:
    stalled = replace(node_status(), stalled_s=3.0)
    monkeypatch.setattr("tests.support.router.fake_nodes.node_status", lambda: stalled)
    assert not await has_outlived(nodes, LOST)


def out_of_reach(name: str) -> Fault:
    return Fault(NodeLost(name, "ping timeout"), is_computing=True, is_outlived=True)


async def test_two_nodes_out_of_reach_for_a_moment_end_no_request(start_router: StartRouter, cluster) -> None:
    for name in ("p0", "p1"):
        cluster.nodes[name].faults = [out_of_reach(name)]
    running = await start_router(cluster, policy=AlwaysTheFirst())
    result = await ask(running)
    assert (text_of(result), result["usage"]["headrace"]["prefill"]["node"]) == (TEXT, "p2")
    await assert_idle(running)


async def test_a_node_that_lives_leaves_the_suspicion_of_the_one_that_does_not(
    start_router: StartRouter, cluster
) -> None:
    cluster.nodes["p0"].faults = [out_of_reach("p0")]
    cluster.nodes["p1"].faults = [Fault(NodeLost("p1", "gone"), is_computing=True)]
    cluster.nodes["p2"].faults = [Fault(NodeLost("p2", "gone"), is_computing=True)]
    running = await start_router(cluster, policy=AlwaysTheFirst())
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "node_crashed")
    await assert_idle(running)
