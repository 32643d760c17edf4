"""Choices of one prompt: the first computes it, the others wait for its blocks and go where they are."""

import asyncio
from dataclasses import replace
from typing import Any

from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from headrace.wire.errors import NodeLost
from headrace.wire.node_messages import Role
from router.requests.admission import Admission
from router.requests.siblings import Siblings
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import FakeCluster, Fault, fake_cluster, node_info, node_status
from tests.unit.router.conftest import Running, StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, decode_node

REQUEST = Request("r", TokenArray.of((1, 2)), 2, Sampling(max_tokens=4, seed=0))


def num_started(cluster: FakeCluster) -> dict[str, int]:
    return {name: len(node.requests) for name, node in cluster.nodes.items()}


def texts(result: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in result["choices"]]


async def started(running: Running, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum(num_started(running.cluster).values()) < count:
            await asyncio.sleep(0.01)


async def test_the_other_choices_wait_until_the_first_has_computed_the_prompt(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer, prefill=2, decode=2, eos_id=0)
    running = await start_router(cluster)
    node = decode_node(cluster, "d0")
    node.gate = asyncio.Semaphore(0)
    cluster.nodes["p0"].hangs = True
    asking = asyncio.create_task(ask(running, n=4))
    await started(running, 2)
    assert (await running.http.get("/cluster")).json()["waiting"] == 3
    assert num_started(cluster) == {"p0": 1, "p1": 0, "d0": 1, "d1": 0}
    running.server.nodes.register(node_info("p0", Role.PREFILL), replace(node_status(), stalled_s=99.0))
    await started(running, 9)  # p1 computes for the first, and all others follow
    assert num_started(cluster) == {"p0": 1, "p1": 4, "d0": 4, "d1": 0}
    for _ in range(4 * len(answer)):
        node.gate.release()
    assert texts(await asking) == [TEXT] * 4


async def test_all_choices_use_the_nodes_of_the_first(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, prefill=2, decode=2, eos_id=0)
    running = await start_router(cluster)
    assert texts(await ask(running, n=4)) == [TEXT] * 4
    assert num_started(cluster) == {"p0": 4, "p1": 0, "d0": 4, "d1": 0}
    assert texts(await ask(running, n=2, prompt=["a", "b"])) == [TEXT] * 4
    assert num_started(cluster) == {"p0": 6, "p1": 2, "d0": 6, "d1": 2}, "each prompt has its own first choice"


async def test_a_choice_goes_elsewhere_when_the_first_one_s_node_is_lost(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, prefill=2, decode=2, eos_id=0)
    lost = Fault(NodeLost("d0", "gone"), 1)
    cluster.nodes["d0"].faults = [Fault(NodeLost("d0", "gone"), 999), lost, lost]
    running = await start_router(cluster)
    assert texts(await ask(running, n=3)) == [TEXT] * 3
    assert num_started(cluster)["d1"] == 2


async def test_the_others_are_freed_when_the_first_choice_fails(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    cluster.nodes["d0"].hangs = True
    running = await start_router(cluster, request_timeout_s=0.3, max_concurrent=2)
    reply = await running.http.post("/v1/completions", json={"prompt": "a", "n": 5})
    assert reply.status_code == 504
    cluster.nodes["d0"].hangs = False
    cluster_status = (await running.http.get("/cluster")).json()
    assert cluster_status["waiting"] == 0


def test_held_back_permits_keep_their_place_and_block_nobody():
    admission = Admission(max_concurrent=2, max_queue=9)
    first, second, third = admission.acquire("one", [REQUEST] * 3, followers=[1, 2])
    (other,) = admission.acquire("one", [REQUEST])
    (later,) = admission.acquire("one", [REQUEST])
    assert [permit.is_granted for permit in (first, second, third, other, later)] == [True, False, False, True, False]
    siblings = Siblings([second, third])
    siblings.prompt_computed()
    other.release()
    assert second.is_granted and not later.is_granted, "it came first"
    second.release()
    assert third.is_granted and not later.is_granted
    first.release()
    assert later.is_granted
    assert admission.waiting == 0
