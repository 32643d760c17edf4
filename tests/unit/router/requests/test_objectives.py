"""Requests whose objectives no node can keep, over HTTP."""

import asyncio
from dataclasses import replace

import pytest

from headrace.step_costs import TIMED_STEPS, StepCosts
from router.routing.plan import Objectives
from router.routing.policies.predicted import Predicted
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import fake_cluster, node_status
from tests.unit.router.conftest import Running, StartRouter

BODY = {"prompt": "a", "max_tokens": 4}
BUSY = replace(node_status(), waiting_tokens=8 << 20, waiting_lengths=(8 << 20,))

SLOW = replace(
    node_status(), costs=StepCosts(step_s=0.004, decode_s=0.002, context_s=0.0), counters={TIMED_STEPS: 99.0}
)


async def busy_router(start_router: StartRouter, answer: list[int], **settings: object) -> Running:
    running = await start_router(fake_cluster(answer), register=False, policy=Predicted(), **settings)
    for info in running.cluster.infos():
        running.server.nodes.register(replace(info, max_step_tokens=1024), BUSY)
    return running


async def test_a_request_that_keeps_its_objective_nowhere_is_refused_with_the_time_until_it_would(
    start_router: StartRouter, answer: list[int]
):
    running = await busy_router(start_router, answer, on_missed_objectives="refuse")
    objectives = {"headrace": {"objectives": {"first_token_s": 2.0}}}
    reply = await running.http.post("/v1/completions", json=BODY | objectives)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "objectives_missed")
    assert "no node keeps the objectives first_token_s 2; its first token would come in" in error["message"]
    assert 60 < int(reply.headers["retry-after"]) < 600
    assert [node.requests for node in running.cluster.nodes.values()] == [[], []]
    assert (await running.http.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("settings", [{}, {"on_missed_objectives": "queue"}])
async def test_a_request_may_rather_wait_than_be_refused(
    start_router: StartRouter, answer: list[int], settings: dict[str, object]
):
    running = await busy_router(start_router, answer, objectives=Objectives(first_token_s=2.0), **settings)
    assert (await running.http.post("/v1/completions", json=BODY)).status_code == 200


async def test_answers_beyond_the_token_gap_wait_in_the_routers_line(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    cluster.nodes["d0"].gate = gate = asyncio.Semaphore(0)  # type: ignore[union-attr]
    running = await start_router(cluster, register=False, objectives=Objectives(token_gap_s=0.010))
    for info in cluster.infos():
        running.server.nodes.register(info, SLOW)
    replies = [asyncio.create_task(running.http.post("/v1/completions", json=BODY)) for _ in range(8)]
    node, num_waiting = cluster.nodes["d0"], 0
    async with asyncio.timeout(PATIENCE_S):
        while len(node.requests) + num_waiting < 8:
            num_waiting = (await running.http.get("/cluster")).json()["waiting"]
    assert (len(node.requests), num_waiting) == (3, 5)
    for _ in range(8 * len(answer)):
        gate.release()
    assert [(await reply).status_code for reply in replies] == [200] * 8
