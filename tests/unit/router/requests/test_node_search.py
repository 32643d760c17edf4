"""The choice of nodes for a request: busy nodes, failed nodes, and nodes that cannot transfer to each other."""

import asyncio
from dataclasses import replace

import pytest

from headrace.wire.errors import NodeBusy, NodeLost, TransferBroken
from headrace.wire.node_messages import LinkStatus, NodeStatus, Role
from router.routing.plan import Policy
from router.routing.policies.round_robin import RoundRobin
from router.routing.reuse import MissRatioCurve, Reuse
from tests.support.patience import PATIENCE_S
from tests.support.router.candidates import AlwaysTheFirst
from tests.support.router.fake_nodes import FakeCluster, Fault, fake_cluster, node_info, node_status
from tests.unit.router.conftest import Running, StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, assert_idle, decode_node, text_of


async def test_after_a_failed_transfer_another_prefill_node_is_asked(start_router: StartRouter, answer: list[int]):
    """A stopped prefill node reports nothing: the decode node reports the failure, at the session's deadline."""
    cluster = fake_cluster(answer, prefill=2, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(TransferBroken("d0", "deadline"))]
    running = await start_router(cluster, policy=AlwaysTheFirst())
    result = await ask(running)
    assert text_of(result) == TEXT
    assert result["usage"]["headrace"]["prefill"]["node"] == "p1"


async def test_a_busy_decode_node_passes_the_request_on(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=2, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeBusy("d0", "full"))]
    running = await start_router(cluster)
    result = await ask(running)
    assert (text_of(result), result["usage"]["headrace"]["migrations"]) == (TEXT, 0)


async def test_a_request_goes_on_on_the_node_that_has_kept_it(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=3, eos_id=0)
    running = await start_router(cluster, policy=AlwaysTheFirst())
    (holder,) = (info for info in cluster.infos() if info.name == "d1")
    body, headers = {"prompt": "a", "max_tokens": 5}, {"x-request-id": "kept"}
    running.server.nodes.register(holder, replace(node_status(), orphans=("cmpl-kept-0",)))
    for given, node in ((headers, "d1"), ({}, "d0"), ({"x-request-id": "other"}, "d0")):
        before = len(cluster.nodes[node].requests)
        assert (await running.http.post("/v1/completions", json=body, headers=given)).status_code == 200
        assert len(cluster.nodes[node].requests) == before + 1


async def test_a_node_that_kept_a_request_and_fails_it_is_not_asked_again(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=2, eos_id=0)
    cluster.nodes["d1"].faults = [Fault(NodeBusy("d1", "full"))]
    running = await start_router(cluster, policy=AlwaysTheFirst())
    (holder,) = (info for info in cluster.infos() if info.name == "d1")
    running.server.nodes.register(holder, replace(node_status(), orphans=("cmpl-kept-0",)))
    body, headers = {"prompt": "a", "max_tokens": 5}, {"x-request-id": "kept"}
    assert (await running.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert (len(cluster.nodes["d1"].requests), len(cluster.nodes["d0"].requests)) == (1, 1)


async def test_a_node_that_stays_busy_is_waited_for(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeBusy("d0", "full"))] * 5
    running = await start_router(cluster)
    assert text_of(await ask(running)) == TEXT


async def test_busy_nodes_are_waited_for_until_the_request_s_own_time_is_over(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer)
    cluster.nodes["d0"].faults = [Fault(NodeBusy("d0", "full"))] * 1000
    running = await start_router(cluster, request_timeout_s=0.5)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 504
    assert "request_timeout_s" in reply.json()["error"]["message"]
    await assert_idle(running)


async def test_prefill_nodes_that_are_lost_while_all_are_busy_leave_the_prompt_to_the_decode_node(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer, eos_id=0)
    cluster.nodes["p0"].faults = [Fault(NodeBusy("p0", "full"))] * 1000
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    async with asyncio.timeout(PATIENCE_S):
        while not cluster.nodes["p0"].requests:
            await asyncio.sleep(0.01)
        running.server.nodes.leave("p0", 1)
        assert (await asking)["usage"]["headrace"]["path"] == "local"


# ------------------------------------------------------------ nodes that stand still, or are expected back


def stalled(seconds: float) -> NodeStatus:
    return replace(node_status(), stalled_s=seconds)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_that_stands_still_loses_its_requests_and_gets_no_more(
    start_router: StartRouter, answer: list[int], role: str
):
    cluster = fake_cluster(answer, prefill=2, decode=2, eos_id=0)
    hanging = cluster.nodes["p0" if role == "prefill" else "d0"]
    hanging.hangs = True
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    async with asyncio.timeout(PATIENCE_S):
        while not hanging.open_calls:
            await asyncio.sleep(0.01)
        running.server.nodes.register(node_info(hanging.name, hanging.role), stalled(14.0))
        await asyncio.sleep(0.05)
        assert hanging.open_calls, "a long step is no stall"
        running.server.nodes.register(node_info(hanging.name, hanging.role), stalled(16.0))
        assert text_of(await asking) == TEXT
        hanging.requests.clear()
        assert [text_of(await ask(running)) for _ in range(3)] == [TEXT] * 3
        assert not hanging.requests
        state = {node["name"]: node["state"] for node in (await running.http.get("/cluster")).json()["nodes"]}
        assert state[hanging.name] == "stalled"
        hanging.hangs = False
        running.server.nodes.register(node_info(hanging.name, hanging.role), node_status())
        await asyncio.gather(*(ask(running) for _ in range(2)))
        assert hanging.requests, "an engine that moves again gets work again"


async def test_a_token_that_comes_as_its_node_stalls_does_not_keep_the_request_there(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer, decode=2, eos_id=0)
    d0 = decode_node(cluster, "d0")
    d0.gate = asyncio.Semaphore(0)
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    async with asyncio.timeout(PATIENCE_S):
        while not d0.gate.locked() or not d0.gate._waiters:
            await asyncio.sleep(0.01)
        d0.gate.release()
        await asyncio.sleep(0)  # the next token is on its way
        running.server.nodes.register(node_info("d0", Role.DECODE), stalled(16.0))
        assert text_of(await asking) == TEXT


async def test_a_decode_node_that_does_not_answer_a_call_is_left(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=2, eos_id=0)
    cluster.nodes["d0"].hangs = True
    running = await start_router(cluster, first_event_timeout_s=0.2)
    assert text_of(await ask(running)) == TEXT
    await assert_idle(running)


async def test_requests_wait_for_a_lost_node_that_should_be_back_in_time(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    running = await start_router(cluster, register=False, request_timeout_s=100.0)
    nodes = running.server.nodes
    lost = node_info("d0", Role.DECODE, start_s=60.0)
    nodes.register(lost, node_status())
    nodes._lose(nodes.all()[0])
    asking = asyncio.create_task(ask(running))
    async with asyncio.timeout(PATIENCE_S):
        while 'headrace_requests_waiting_for_node{role="decode"} 1.0' not in (await running.http.get("/metrics")).text:
            await asyncio.sleep(0.01)
        unready = await running.http.get("/ready")
        assert (unready.status_code, unready.headers["retry-after"]) == (503, "60")
        assert "its last start took 60 s" in unready.json()["error"]["message"]
        nodes.register(replace(lost, incarnation=2), node_status())
        assert text_of(await asking) == TEXT


async def test_a_request_that_a_node_s_return_would_come_too_late_for_is_refused_at_once(
    start_router: StartRouter, answer: list[int]
):
    running = await start_router(fake_cluster(answer), register=False, request_timeout_s=30.0)
    nodes = running.server.nodes
    nodes.register(node_info("d0", Role.DECODE, start_s=60.0), node_status())
    nodes._lose(nodes.all()[0])
    refused = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")


async def test_a_router_that_has_just_started_waits_for_its_first_node(start_router: StartRouter, answer: list[int]):
    running = await start_router(fake_cluster(answer), register=False)
    asking = asyncio.create_task(ask(running))
    async with asyncio.timeout(PATIENCE_S):
        while (await running.http.get("/cluster")).json()["phases"]["queued"] == 0:
            await asyncio.sleep(0.01)
        running.register()
        assert text_of(await asking).startswith(TEXT)


async def test_nobody_waits_for_a_node_that_left_or_was_lost_long_ago(start_router: StartRouter, answer: list[int]):
    running = await start_router(fake_cluster(answer), register=False, node_return_timeout_s=0.2)
    nodes = running.server.nodes
    for how in ("leaves", "is lost"):
        nodes.register(node_info("d0", Role.DECODE), node_status())
        nodes.leave("d0", 1) if how == "leaves" else nodes._lose(nodes.all()[0])
        async with asyncio.timeout(PATIENCE_S):
            refused = await running.http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_node_available"), how


# ------------------------------------------------------------ nodes that can transfer to each other

ANSWER = [5, 6, 7, 8]
ASKS = 6


async def start(
    start_router: StartRouter, cluster: FakeCluster, devices: dict[str, str], policy: Policy | None = None
) -> Running:
    running = await start_router(cluster, register=False, policy=policy)
    for info in cluster.infos():
        running.server.nodes.register(replace(info, device=devices[info.name]), node_status())
    return running


async def path_of_answer(running: Running) -> tuple[str, str | None, str]:
    """The path, and the nodes that the answer came from."""
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True, "headrace": {"report": True}}
    reply = await running.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    result = reply.json()
    assert result["choices"][0]["token_ids"] == ANSWER
    report = result["usage"]["headrace"]
    return report["path"], (report["prefill"] or {}).get("node"), report["decode"]["node"]


async def test_each_decode_node_is_served_by_prefill_nodes_of_its_kind(start_router: StartRouter):
    devices = {"p0": "cpu", "p1": "cuda", "d0": "cuda", "d1": "cpu"}
    running = await start(start_router, fake_cluster(ANSWER, prefill=2, decode=2), devices)
    paths = {await path_of_answer(running) for _ in range(ASKS)}
    assert paths == {("remote", "p1", "d0"), ("remote", "p0", "d1")}


async def test_a_decode_node_without_a_prefill_node_of_its_kind_does_it_all(start_router: StartRouter):
    devices = {"p0": "cpu", "d0": "cuda", "d1": "cpu"}
    running = await start(start_router, fake_cluster(ANSWER, decode=2), devices, RoundRobin())
    paths = {await path_of_answer(running) for _ in range(ASKS)}
    assert {(path, decode) for path, _, decode in paths} == {("local", "d0"), ("remote", "d1")}


async def test_a_request_whose_only_fitting_prefill_node_is_lost_goes_on_without(start_router: StartRouter):
    cluster = fake_cluster(ANSWER, prefill=2)
    cluster.nodes["p0"].faults = [Fault(NodeLost("p0", "gone"))]
    running = await start(start_router, cluster, {"p0": "cpu", "p1": "cuda", "d0": "cpu"})
    path, _, decode = await path_of_answer(running)
    assert (path, decode) == ("local", "d0")
    assert cluster.nodes["p1"].requests == []


async def test_a_prefill_node_whose_link_check_failed_is_asked_after_the_others(start_router: StartRouter):
    cluster = fake_cluster(ANSWER, prefill=2)
    running = await start(start_router, cluster, {"p0": "cpu", "p1": "cpu", "d0": "cpu"})
    broken = replace(node_status(), links=(LinkStatus("d0", error="nobody is there"),))
    p0 = next(info for info in cluster.infos() if info.name == "p0")
    running.server.nodes.register(p0, broken)
    assert {await path_of_answer(running) for _ in range(ASKS)} == {("remote", "p1", "d0")}
    cluster.nodes["p1"].faults = [Fault(NodeLost("p1", "gone"))]
    assert await path_of_answer(running) == ("remote", "p0", "d0"), "its last link check may be out of date"


@pytest.mark.parametrize(("reused_tokens", "are_short"), [(512, False), (1536, True), (4096, False)])
async def test_the_policy_learns_whether_caches_are_short(
    reused_tokens: int, are_short: bool, start_router: StartRouter, answer: list[int]
):
    """Each of the two nodes holds 1,024 tokens."""
    cluster = fake_cluster(answer, eos_id=0)
    running = await start_router(cluster, roles="elastic")
    context = running.server.context
    context.ledger.reuses.curve = MissRatioCurve([Reuse(1, reused_tokens, 0)])
    await ask(running)
    ((decision,),) = (context.decisions.of(request.request_id).values() for request in cluster.nodes["d0"].requests)
    assert [each.request.caches_are_short for each in decision] == [are_short]
