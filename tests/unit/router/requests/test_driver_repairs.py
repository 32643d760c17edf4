"""Nodes that fail under a request: the client sees every token once, in order."""

import asyncio
from typing import Any, Literal

import pytest

from headrace.wire import messages as m
from headrace.wire.errors import InvalidLogits, NodeBusy, NodeLost, PrefixForgotten, RequestRefused, TransferBroken
from headrace.wire.node_messages import Role
from tests.support.patience import PATIENCE_S
from tests.support.router.candidates import AlwaysTheFirst
from tests.support.router.fake_nodes import FakeDecodeNode, Fault, fake_cluster, node_info, node_status
from tests.unit.router.conftest import StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, assert_idle, decode_node, prefill_node, text_of


@pytest.mark.parametrize(
    "error", [NodeLost("p0", "gone"), TransferBroken("p0", "reset"), PrefixForgotten("p0", "not numbers")]
)
@pytest.mark.parametrize("after_tokens", [0, 1])
async def test_another_prefill_node_takes_the_same_reservation(
    start_router: StartRouter, answer: list[int], error: Any, after_tokens: int
):
    cluster = fake_cluster(answer, prefill=2, eos_id=0)
    cluster.nodes["p0"].faults = [Fault(error, after_tokens)]
    running = await start_router(cluster)
    result = await ask(running)
    assert text_of(result) == TEXT
    report = result["usage"]["headrace"]
    assert report["prefill"]["node"] == "p1"
    assert report["migrations"] == 0
    assert len(cluster.nodes["d0"].requests) == 1
    assert decode_node(cluster, "d0").commands == [m.Renew(1)]
    await assert_idle(running)


async def test_a_reservation_is_given_back_when_the_prefill_node_has_no_room(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer, prefill=2, eos_id=0)
    cluster.nodes["p0"].faults = [Fault(NodeBusy("p0", "full"))]
    running = await start_router(cluster)
    result = await ask(running)
    assert text_of(result) == TEXT
    report = result["usage"]["headrace"]
    assert (report["prefill"]["node"], report["migrations"]) == ("p1", 0)
    assert len(cluster.nodes["d0"].requests) == 2
    assert decode_node(cluster, "d0").commands == []
    await assert_idle(running)


async def test_the_only_prefill_node_is_asked_again(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["p0"].faults = [Fault(TransferBroken("p0", "reset"), 1), Fault(NodeBusy("p0", "full"))]
    running = await start_router(cluster)
    assert text_of(await ask(running)) == TEXT
    assert len(cluster.nodes["p0"].requests) == 3


async def test_a_transfer_that_the_decode_node_refuses_is_repeated(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(TransferBroken("d0", "digest"))]
    running = await start_router(cluster)
    assert text_of(await ask(running)) == TEXT
    assert decode_node(cluster, "d0").commands == [m.Renew(1)]


async def test_a_transfer_that_never_lands_is_repeated_before_its_deadline(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer, eos_id=0)
    prefill_node(cluster, "p0").num_lost_transfers = 1
    running = await start_router(cluster, landing_timeout_s=0.1)
    assert text_of(await ask(running)) == TEXT
    assert decode_node(cluster, "d0").commands == [m.Renew(1)]
    assert len(cluster.nodes["p0"].requests) == 2
    await assert_idle(running)


async def test_lost_prefill_nodes_leave_the_prompt_to_the_decode_node(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["p0"].faults = [Fault(NodeLost("p0", "gone"), 1)]
    running = await start_router(cluster)
    result = await ask(running)
    assert text_of(result) == TEXT
    assert result["usage"]["headrace"]["path"] == "local"
    assert result["usage"]["completion_tokens"] == len(answer)


@pytest.mark.parametrize("error", [NodeLost("d0", "gone"), PrefixForgotten("d0", "not numbers")])
@pytest.mark.parametrize("after_tokens", [1, 5])
async def test_an_answer_that_its_decode_node_fails_migrates(
    start_router: StartRouter, answer: list[int], error: Any, after_tokens: int
):
    cluster = fake_cluster(answer, decode=2, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(error, after_tokens)]
    running = await start_router(cluster)
    result = await ask(running)
    assert text_of(result) == TEXT
    assert result["usage"]["completion_tokens"] == len(answer)
    report = result["usage"]["headrace"]
    assert (report["migrations"], report["decode"]["node"]) == (1, "d1")
    first, second = (cluster.nodes[name].requests[0] for name in ("d0", "d1"))
    assert second.tokens == first.tokens.followed_by(answer[: 1 + after_tokens])
    assert second.num_prompt_tokens == first.num_prompt_tokens == len(first.tokens)
    await assert_idle(running)


async def test_max_tokens_counts_across_a_migration(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=2)
    cluster.nodes["d0"].faults = [Fault(NodeLost("d0", "gone"), 3)]
    running = await start_router(cluster)
    result = await ask(running, max_tokens=7)
    assert result["usage"]["completion_tokens"] == 7
    assert result["choices"][0]["finish_reason"] == "length"


async def test_the_only_decode_node_may_come_back(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeLost("d0", "gone"), 3)]
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    nodes = running.server.nodes
    async with asyncio.timeout(PATIENCE_S):
        while nodes.live(Role.DECODE):
            await asyncio.sleep(0.01)
        assert (await running.http.get("/cluster")).json()["phases"]["migrating"] == 1
        second = asyncio.create_task(ask(running))  # is not refused: the node may be back soon
        await asyncio.sleep(0)
        lost = cluster.nodes["d0"]
        cluster.nodes["d0"] = FakeDecodeNode("d0", answer, lost.transfers, eos_id=0)
        nodes.register(node_info("d0", Role.DECODE, incarnation=2), node_status())
        result = await asking
        assert text_of(await second) == TEXT
    assert (text_of(result), result["usage"]["headrace"]["migrations"]) == (TEXT, 1)
    assert lost.closed and not cluster.nodes["d0"].closed


class CutOff(asyncio.Semaphore):
    """Keeps a prompt from its first token until `cut`, and then ends the call as a node does whose grace is over."""

    def __init__(self) -> None:
        super().__init__(0)
        self.computing, self.cut = asyncio.Event(), asyncio.Event()

    async def acquire(self) -> Literal[True]:
        self.computing.set()
        await self.cut.wait()
        raise NodeLost("d", "CANCELLED")


async def test_nodes_that_leave_one_after_the_other_do_not_end_a_request(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, prefill=0, decode=3, eos_id=0)
    gates = {name: CutOff() for name in ("d0", "d1")}
    for name, gate in gates.items():
        decode_node(cluster, name).gate = gate
    running = await start_router(cluster, policy=AlwaysTheFirst())
    asking = asyncio.create_task(ask(running))
    async with asyncio.timeout(PATIENCE_S):
        for name, gate in gates.items():
            await gate.computing.wait()
            running.server.nodes.leave(name, 1)
            gate.cut.set()
        assert text_of(await asking) == TEXT


async def test_a_refusal_is_a_400_and_is_not_repeated(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=2)
    cluster.nodes["d0"].faults = [Fault(RequestRefused("d0", "prompt of 9 tokens exceeds the pool"))]
    running = await start_router(cluster)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 400
    assert "exceeds the pool" in reply.json()["error"]["message"]
    assert cluster.nodes["d1"].requests == []


@pytest.mark.parametrize("node", ["p0", "d0"])
async def test_a_request_without_a_next_token_is_a_500_and_is_not_repeated(
    node: str, start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer, decode=2)
    cluster.nodes[node].faults = [Fault(InvalidLogits(node, "the model's logits are not numbers"))]
    running = await start_router(cluster)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "invalid_logits")
    assert "not numbers" in reply.json()["error"]["message"] and reply.headers["x-should-retry"] == "false"
    assert cluster.nodes["d1"].requests == []
    await assert_idle(running)


async def test_attempts_are_bounded(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    cluster.nodes["p0"].faults = [Fault(TransferBroken("p0", "reset"))] * 9
    running = await start_router(cluster, max_attempts=2)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 503
    assert len(cluster.nodes["p0"].requests) == 2
    await assert_idle(running)
