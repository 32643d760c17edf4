"""Requests over fake nodes: their decisions are explained and measured, and leave nothing in the ledger."""

import asyncio

from headrace.wire import messages as m
from headrace.wire.errors import NodeLost
from router.routing.candidates import Load
from tests.support.patience import PATIENCE_S
from tests.support.router.candidates import AlwaysTheFirst
from tests.support.router.fake_nodes import Fault, fake_cluster
from tests.unit.router.conftest import Running, StartRouter
from tests.unit.router.requests.conftest import ask, decode_node

FREE = Load(free_tokens=64 * 16, free_slots=8, empty_tokens=64 * 16)


def loads(running: Running) -> dict[str, Load]:
    context = running.server.context
    loads = {name: context.ledger.load(name, context.clock()) for name in running.cluster.nodes}
    return {name: load._replace(recent_lengths=()) for name, load in loads.items()}  # what is over, too


async def test_the_report_says_why_a_request_went_where_it_went(start_router: StartRouter, answer: list[int]):
    running = await start_router(fake_cluster(answer, eos_id=0))
    routing = (await ask(running))["usage"]["headrace"]["routing"]
    assert routing["plan"] == {"prefill": "p0", "decode": "d0", "fetch_from": None}
    assert (routing["kind"], routing["reason"], routing["cause"]) == ("hand_over", "handed over", "request")
    assert routing["measured"]["first_token_s"] > 0
    assert routing["measured"]["token_gap_s"] > 0
    assert routing["predicted"]["computed_tokens"] == routing["measured"]["computed_tokens"]


async def test_each_decision_about_a_request_is_explained(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, decode=2, eos_id=0)
    cluster.nodes["d0"].faults = [Fault(NodeLost("d0", "gone"), 3)]
    running = await start_router(cluster, policy=AlwaysTheFirst())
    result = await ask(running)
    explained = (await running.http.get(f"/cluster/requests/{result['id']}/explain")).json()
    ((request_id, decisions),) = ((each["id"], each["decisions"]) for each in explained["requests"])
    assert request_id == f"{result['id']}-0"
    assert [(each["cause"], each["plan"]["decode"]) for each in decisions] == [("request", "d0"), ("retry", "d1")]
    assert decisions[1]["request"]["num_tokens"] == decisions[0]["request"]["num_tokens"] + 4
    assert [each["name"] for each in decisions[0]["candidates"]] == ["d0", "d1", "p0"]
    assert [each["name"] for each in decisions[1]["candidates"]] == ["d1", "p0"]
    assert result["usage"]["headrace"]["routing"]["cause"] == "retry"


async def test_an_unknown_request_cannot_be_explained(start_router: StartRouter, answer: list[int]):
    running = await start_router(fake_cluster(answer))
    reply = await running.http.get("/cluster/requests/cmpl-x/explain")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "request_not_found")


async def test_metrics_count_decisions_and_compare_predictions(start_router: StartRouter, answer: list[int]):
    running = await start_router(fake_cluster(answer, eos_id=0))
    await ask(running)
    metrics = (await running.http.get("/metrics")).text
    assert 'headrace_routing_decisions_total{cause="request",plan="hand_over",reason="handed over"} 1.0' in metrics
    assert 'headrace_prediction_ratio_count{quantity="computed_tokens"} 1.0' in metrics
    assert 'headrace_prediction_ratio_bucket{le="1.03",quantity="computed_tokens"} 1.0' in metrics


async def test_a_request_counts_on_its_nodes_while_it_runs_and_no_longer(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, eos_id=0)
    node = decode_node(cluster, "d0")
    node.gate = asyncio.Semaphore(0)
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    async with asyncio.timeout(PATIENCE_S):
        while loads(running)["d0"].num_decoding == 0:
            await asyncio.sleep(0.01)
        assert loads(running)["p0"] == FREE, "its prompt is computed"
        for _ in range(len(answer)):
            node.gate.release()
        await asking
    assert set(loads(running).values()) == {FREE}


async def test_a_request_that_is_cut_off_leaves_nothing_behind(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    cluster.nodes["p0"].hangs = True
    running = await start_router(cluster)
    asking = asyncio.create_task(ask(running))
    async with asyncio.timeout(PATIENCE_S):
        while loads(running)["p0"].waiting_tokens == 0:
            await asyncio.sleep(0.01)
        assert loads(running)["d0"].num_coming == 1
        asking.cancel()
        while set(loads(running).values()) != {FREE}:
            await asyncio.sleep(0.01)


async def test_a_repeated_prefill_is_planned_and_counted_anew(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer, prefill=2, eos_id=0)
    cluster.nodes["p0"].faults = [Fault(NodeLost("p0", "gone"))]
    running = await start_router(cluster)
    result = await ask(running)
    explained = (await running.http.get(f"/cluster/requests/{result['id']}-0/explain")).json()
    decisions = explained["requests"][0]["decisions"]
    assert [(each["cause"], each["plan"]["prefill"]) for each in decisions] == [("request", "p0"), ("renewal", "p1")]
    assert isinstance(decode_node(cluster, "d0").commands[0], m.Renew)
    assert set(loads(running).values()) == {FREE}
