"""Requests through a real router and fake nodes that fail: the client sees every token once, in order."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.request import Request
from headrace.wire import messages as m
from headrace.wire.errors import NodeBusy, NodeLost, RequestRefused, TransferBroken
from router.text.tokens import ModelTokens
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import (
    FakeCluster,
    FakeDecodeNode,
    FakePrefillNode,
    Fault,
    fake_cluster,
    node_info,
    node_status,
)
from tests.unit.router.conftest import Running, StartRouter

TEXT = "The code of June is 471. A channel carries the stream over stones."


@pytest.fixture
def answer(tokens: ModelTokens) -> list[int]:
    return [*tokens.encode(TEXT), 0]


async def ask(running: Running, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "What is the code of June?", "max_tokens": 100, "headrace": {"report": True}} | fields
    reply = await running.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def text_of(result: dict[str, Any]) -> str:
    return result["choices"][0]["text"]


def prefill_node(cluster: FakeCluster, name: str) -> FakePrefillNode:
    node = cluster.nodes[name]
    assert isinstance(node, FakePrefillNode)
    return node


def decode_node(cluster: FakeCluster, name: str) -> FakeDecodeNode:
    node = cluster.nodes[name]
    assert isinstance(node, FakeDecodeNode)
    return node


async def assert_idle(running: Running) -> None:
    """Every call is left and every request has ended, at once: the answer is there."""
    for node in running.cluster.nodes.values():
        assert node.open_calls == 0, f"{node.name} still has calls"
    phases = (await running.http.get("/cluster")).json()["phases"]
    assert {phase for phase, count in phases.items() if count} <= {"done", "failed"}


@pytest.mark.parametrize("error", [NodeLost("p0", "gone"), TransferBroken("p0", "reset"), NodeBusy("p0", "full")])
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


async def test_the_only_prefill_node_is_asked_again(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["p0"].faults = [Fault(TransferBroken("p0", "reset"), 1), Fault(NodeBusy("p0", "full"))]
    running = await start_router(cluster)
    assert text_of(await ask(running)) == TEXT
    assert len(cluster.nodes["p0"].requests) == 3


async def test_a_hand_over_that_the_decode_node_refuses_is_repeated(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(TransferBroken("d0", "digest"))]
    running = await start_router(cluster)
    assert text_of(await ask(running)) == TEXT
    assert decode_node(cluster, "d0").commands == [m.Renew(1)]


class AlwaysTheFirst:
    def pick(self, candidates: Sequence[m.NodeInfo], request: Request) -> m.NodeInfo:
        return candidates[0]


async def test_after_a_hand_over_that_failed_another_prefill_node_is_asked(
    start_router: StartRouter, answer: list[int]
):
    """A stopped prefill node says nothing: it is the decode node that tells of it, at the session's deadline."""
    cluster = fake_cluster(answer, prefill=2, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(TransferBroken("d0", "deadline"))]
    running = await start_router(cluster, new_policy=AlwaysTheFirst)
    result = await ask(running)
    assert text_of(result) == TEXT
    assert result["usage"]["headrace"]["prefill"]["node"] == "p1"


async def test_a_hand_over_that_never_lands_is_repeated_before_its_deadline(
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


@pytest.mark.parametrize("after_tokens", [1, 5])
async def test_a_lost_decode_node_migrates(start_router: StartRouter, answer: list[int], after_tokens: int):
    cluster = fake_cluster(answer, decode=2, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeLost("d0", "gone"), after_tokens)]
    running = await start_router(cluster)
    result = await ask(running)
    assert text_of(result) == TEXT
    assert result["usage"]["completion_tokens"] == len(answer)
    report = result["usage"]["headrace"]
    assert (report["migrations"], report["decode"]["node"]) == (1, "d1")
    first, second = (cluster.nodes[name].requests[0] for name in ("d0", "d1"))
    assert second.tokens == (*first.tokens, *answer[: 1 + after_tokens])
    assert second.num_prompt_tokens == first.num_prompt_tokens == len(first.tokens)
    await assert_idle(running)


async def test_max_tokens_counts_across_a_migration(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=2)
    cluster.nodes["d0"].faults = [Fault(NodeLost("d0", "gone"), 3)]
    running = await start_router(cluster)
    result = await ask(running, max_tokens=7)
    assert result["usage"]["completion_tokens"] == 7
    assert result["choices"][0]["finish_reason"] == "length"


async def test_a_busy_decode_node_passes_the_request_on(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=2, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeBusy("d0", "full"))]
    running = await start_router(cluster)
    result = await ask(running)
    assert (text_of(result), result["usage"]["headrace"]["migrations"]) == (TEXT, 0)


async def test_a_node_that_stays_busy_is_waited_for(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeBusy("d0", "full"))] * 5
    running = await start_router(cluster)
    assert text_of(await ask(running)) == TEXT


async def test_patience_with_busy_nodes_ends_in_503(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    cluster.nodes["d0"].faults = [Fault(NodeBusy("d0", "full"))] * 1000
    running = await start_router(cluster, busy_timeout_s=0.3)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert "every decode node stayed busy for 0.3 s" in reply.json()["error"]["message"]
    await assert_idle(running)


async def test_a_refusal_is_a_400_and_is_not_repeated(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=2)
    cluster.nodes["d0"].faults = [Fault(RequestRefused("d0", "prompt of 9 tokens exceeds the pool"))]
    running = await start_router(cluster)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 400
    assert "exceeds the pool" in reply.json()["error"]["message"]
    assert cluster.nodes["d1"].requests == []


async def test_attempts_are_bounded(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    cluster.nodes["p0"].faults = [Fault(TransferBroken("p0", "reset"))] * 9
    running = await start_router(cluster, max_attempts=2)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 503
    assert len(cluster.nodes["p0"].requests) == 2
    await assert_idle(running)


async def test_the_deadline_ends_in_504_and_leaves_the_nodes(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    decode_node(cluster, "d0").gate = asyncio.Semaphore(2)  # and then it hangs
    running = await start_router(cluster, request_timeout_s=0.5)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 504
    assert "request_timeout_s" in reply.json()["error"]["message"]
    await assert_idle(running)


async def test_an_error_after_the_first_tokens_is_an_event(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    decode_node(cluster, "d0").gate = asyncio.Semaphore(2)
    running = await start_router(cluster, request_timeout_s=0.5)
    reply = await running.http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert reply.status_code == 200
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    assert len(events) >= 2
    assert "[DONE]" not in reply.text


async def test_an_error_while_all_text_is_held_back_has_its_status_code(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    cluster.nodes["p0"].faults = [Fault(TransferBroken("p0", "reset"), after_tokens=1)] * 9
    running = await start_router(cluster, max_attempts=2)
    body = {"prompt": "a", "stream": True, "stop": [f"{TEXT} And"]}
    reply = await running.http.post("/v1/completions", json=body)
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "no_node_available"
    await assert_idle(running)


async def test_a_client_that_leaves_frees_the_nodes(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    node = decode_node(cluster, "d0")
    node.gate = asyncio.Semaphore(2)
    running = await start_router(cluster)
    body = {"prompt": "a", "stream": True, "max_tokens": 1000}
    async with running.http.stream("POST", "/v1/completions", json=body) as reply:
        await anext(reply.aiter_lines())
        assert node.open_calls == 1
    async with asyncio.timeout(PATIENCE_S):
        while node.open_calls or (await running.http.get("/cluster")).json()["phases"]["failed"] != 1:
            await asyncio.sleep(0.01)
    assert 'headrace_requests_total{outcome="cancelled"} 1.0' in (await running.http.get("/metrics")).text


async def test_a_client_that_leaves_before_the_answer_frees_the_nodes(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    node = decode_node(cluster, "d0")
    node.gate = asyncio.Semaphore(0)
    running = await start_router(cluster)
    task = asyncio.create_task(running.http.post("/v1/completions", json={"prompt": "a"}))
    async with asyncio.timeout(PATIENCE_S):
        while not node.open_calls:
            await asyncio.sleep(0.01)
        task.cancel()
        while node.open_calls:
            await asyncio.sleep(0.01)


async def test_the_first_token_does_not_wait_for_the_hand_over(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    node = decode_node(cluster, "d0")
    node.gate = asyncio.Semaphore(0)
    running = await start_router(cluster)
    body = {"prompt": "a", "stream": True, "max_tokens": 100}
    async with running.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.aiter_lines()
        first = json.loads((await anext(lines)).removeprefix("data: "))
        assert first["choices"][0]["text"]
        for _ in range(len(answer)):
            node.gate.release()
        assert "data: [DONE]" in [line async for line in lines]


async def test_waiting_tokens_travel_together(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    decode_node(cluster, "d0").tokens_per_event = 1000
    running = await start_router(cluster)
    reply = await running.http.post("/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 100})
    events = [json.loads(e.removeprefix("data: ")) for e in reply.text.split("\n\n") if e and "[DONE]" not in e]
    assert "".join(e["choices"][0]["text"] for e in events) == TEXT
    assert len(events) <= 3  # the first token, the others, the finish reason


async def test_one_token_never_meets_a_decode_node(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, resumed_tokens=2)
    running = await start_router(cluster)
    result = await ask(running, max_tokens=1)
    assert result["usage"]["completion_tokens"] == 1
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert result["usage"]["headrace"]["decode"] is None
    assert cluster.nodes["d0"].requests == []


async def test_without_prefill_nodes_a_decode_node_does_it_all(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, prefill=0, resumed_tokens=3, eos_id=0)
    running = await start_router(cluster)
    result = await ask(running)
    assert text_of(result) == TEXT
    assert result["usage"]["headrace"]["path"] == "local"
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert (await ask(running, max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_an_end_at_the_first_token_cancels_the_decode_node(start_router: StartRouter):
    cluster = fake_cluster([0], eos_id=0, resumed_tokens=1)
    running = await start_router(cluster)
    result = await ask(running)
    assert (text_of(result), result["choices"][0]["finish_reason"]) == ("", "stop")
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == 1  # the prefill node's report came
    await assert_idle(running)


async def test_a_silent_prefill_node_cannot_hold_a_finished_answer_up(start_router: StartRouter):
    cluster = fake_cluster([0], eos_id=0)
    cluster.nodes["p0"].hold_done = asyncio.Event()  # type: ignore[union-attr]
    running = await start_router(cluster)
    async with asyncio.timeout(PATIENCE_S):
        result = await ask(running)
    assert result["usage"]["headrace"]["prefill"] is None


async def test_a_stop_string_ends_the_decode_with_its_report(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    running = await start_router(cluster)
    result = await ask(running, stop=["is 471"])
    assert text_of(result) == "The code of June "
    assert result["choices"][0]["finish_reason"] == "stop"
    assert m.Stop() in decode_node(cluster, "d0").commands
    assert result["usage"]["headrace"]["decode"]["node"] == "d0"
    assert result["usage"]["completion_tokens"] < len(answer)
    await assert_idle(running)


async def test_min_tokens_puts_stop_strings_off(start_router: StartRouter, answer: list[int], tokens: ModelTokens):
    running = await start_router(fake_cluster(answer, eos_id=0))
    first = len(tokens.encode("The code"))
    assert text_of(await ask(running, stop="code", min_tokens=first)) == TEXT
    assert text_of(await ask(running, stop="code")) == "The "


async def test_a_full_queue_refuses_with_429(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    node = decode_node(cluster, "d0")
    node.gate = asyncio.Semaphore(0)
    running = await start_router(cluster, max_concurrent=1, max_queue=1)
    waiting = [asyncio.create_task(ask(running)) for _ in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        while (await running.http.get("/cluster")).json()["waiting"] != 1:
            await asyncio.sleep(0.01)
    refused = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    for _ in range(2 * len(answer)):
        node.gate.release()
    assert [text_of(result) for result in await asyncio.gather(*waiting)] == [TEXT, TEXT]


async def test_no_node_is_503_and_not_ready(start_router: StartRouter, answer: list[int]):
    running = await start_router(fake_cluster(answer), register=False)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
    assert (await running.http.get("/ready")).status_code == 503
    running.register("p0")
    assert (await running.http.get("/ready")).status_code == 503
    running.register("d0")
    assert (await running.http.get("/ready")).status_code == 200


async def test_the_only_decode_node_may_come_back(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeLost("d0", "gone"), 3)]
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    nodes = running.server.nodes
    async with asyncio.timeout(PATIENCE_S):
        while nodes.live(m.Role.DECODE):
            await asyncio.sleep(0.01)
        assert (await running.http.get("/cluster")).json()["phases"]["migrating"] == 1
        second = asyncio.create_task(ask(running))  # is not refused: the node may be back soon
        await asyncio.sleep(0)
        lost = cluster.nodes["d0"]
        cluster.nodes["d0"] = FakeDecodeNode("d0", answer, lost.transfers, eos_id=0)
        nodes.register(node_info("d0", m.Role.DECODE, incarnation=2), node_status())
        result = await asking
        assert text_of(await second) == TEXT
    assert (text_of(result), result["usage"]["headrace"]["migrations"]) == (TEXT, 1)
    assert lost.closed and not cluster.nodes["d0"].closed
