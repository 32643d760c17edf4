"""A request through a real router and fake nodes: streaming, deadlines, stops, and clients that leave."""

import asyncio
import json

from headrace.wire import messages as m
from headrace.wire.errors import NodeLost, TransferBroken
from router.routing.plan import Objectives
from router.text.tokens import ModelTokens
from tests.support.loop_clock import leap_to, soon
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import Fault, fake_cluster
from tests.unit.router.conftest import StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, assert_idle, at_the_gate, decode_node, text_of

LINE_S = 0.3
TIMEOUT_S = 60.0


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
    running = await start_router(cluster, request_timeout_s=TIMEOUT_S)
    due_s = soon(TIMEOUT_S)
    async with running.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as reply:
        assert reply.status_code == 200
        await at_the_gate(decode_node(cluster, "d0"))
        leap_to(due_s)
        text = (await reply.aread()).decode()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    assert len(events) >= 2
    assert "[DONE]" not in text


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


async def test_a_request_that_could_be_resumed_is_abandoned_unless_it_ends_by_itself(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer, eos_id=0)
    node = decode_node(cluster, "d0")
    running = await start_router(cluster, request_timeout_s=TIMEOUT_S)

    async def ask_as(request_id: str, **more: object) -> int:
        reply = await running.http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 100} | more, headers={"x-request-id": request_id}
        )
        return reply.status_code

    assert await ask_as("whole") == 200
    node.gate = asyncio.Semaphore(2)
    due_s = soon(TIMEOUT_S)
    late = asyncio.create_task(ask_as("late"))
    await at_the_gate(node)
    leap_to(due_s)
    assert await late == 504
    node.gate = None
    assert await ask_as("one", stop=TEXT[0]) == 200  # in the first token: the decode node is not needed any more
    assert (await running.http.post("/v1/completions", json={"prompt": "a", "stop": TEXT[0]})).status_code == 200
    assert node.abandoned == ["cmpl-late-0", "cmpl-one-0"]
    orphans = ["cmpl-whole-0", "cmpl-late-0", "cmpl-one-0"]
    assert running.server.nodes.left.among(("d0", 1), orphans) == ("cmpl-late-0", "cmpl-one-0")
    await assert_idle(running)


async def test_a_node_whose_calls_broke_is_told_to_give_up_what_goes_on_elsewhere(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer, decode=2)
    lost = NodeLost("d0", "no answer to a ping")
    decode_node(cluster, "d0").faults = [Fault(lost, after_tokens=3, is_outlived=True)]
    running = await start_router(cluster)
    body = {"prompt": "a", "max_tokens": 9}
    for headers in ({"x-request-id": "kept"}, {}):
        assert (await running.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert running.server.nodes.left.among(("d0", 1), ["cmpl-kept-0"]) == ("cmpl-kept-0",)
    assert running.server.nodes.left.among(("d1", 1), ["cmpl-kept-0"]) == ()
    await assert_idle(running)


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


async def test_the_first_token_does_not_wait_for_the_transfer(start_router: StartRouter, answer: list[int]):
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


async def test_nodes_are_told_the_token_gap_of_the_request_or_the_operator(
    start_router: StartRouter, answer: list[int]
):
    cluster = fake_cluster(answer)
    running = await start_router(cluster, objectives=Objectives(first_token_s=2.0, token_gap_s=0.05))
    await ask(running)
    await ask(running, headrace={"report": True, "objectives": {"token_gap_s": 0.01}})
    for name in ("p0", "d0"):
        assert [request.token_gap_s for request in cluster.nodes[name].requests] == [0.05, 0.01]


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


async def test_nodes_count_a_requests_age_from_its_admission_and_tell_clients_apart(
    start_router: StartRouter, answer: list[int]
):
    cluster, now_s = fake_cluster(answer, eos_id=0), 100.0
    node = decode_node(cluster, "d0")
    node.gate = asyncio.Semaphore(0)
    settings = {"max_concurrent": 1, "max_queue": 2, "client_header": "x-tenant"}
    running = await start_router(cluster, clock=lambda: now_s, **settings)

    async def ask_as(tenant: str) -> None:
        reply = await running.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-tenant": tenant})
        assert reply.status_code == 200

    asking = [asyncio.create_task(ask_as(tenant)) for tenant in ("one", "two", "one")]
    async with asyncio.timeout(PATIENCE_S):
        while (await running.http.get("/cluster")).json()["waiting"] != 2:
            await asyncio.sleep(0.01)
    now_s += LINE_S
    for _ in range(3 * len(answer)):
        node.gate.release()
    await asyncio.gather(*asking)
    assert [request.age_s for request in node.requests] == [0.0] * 3
    clients = [request.client for request in node.requests]
    assert len(clients) == 3 and len(set(clients)) == 2


async def test_no_node_is_503_and_not_ready(start_router: StartRouter, answer: list[int]):
    running = await start_router(fake_cluster(answer), register=False, heartbeat_s=0.2)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
    assert (await running.http.get("/ready")).status_code == 503
    running.register("p0")
    assert (await running.http.get("/ready")).status_code == 503
    assert "headrace_ready 0.0" in (await running.http.get("/metrics")).text
    running.register("d0")
    assert (await running.http.get("/ready")).status_code == 200
    assert "headrace_ready 1.0" in (await running.http.get("/metrics")).text


async def test_with_elastic_roles_a_prefill_node_alone_is_ready(start_router: StartRouter, answer: list[int]):
    running = await start_router(fake_cluster(answer), register=False, roles="elastic")
    running.register("p0")
    assert (await running.http.get("/ready")).status_code == 200
