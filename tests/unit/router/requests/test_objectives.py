"""Requests whose objectives no node can keep, over HTTP."""

from dataclasses import replace

import pytest

from router.routing.plan import Objectives
from router.routing.policies.predicted import Predicted
from tests.support.router.fake_nodes import fake_cluster, node_status
from tests.unit.router.conftest import Running, StartRouter

BODY = {"prompt": "a", "max_tokens": 4}
BUSY = replace(node_status(), waiting_tokens=8 << 20, waiting_lengths=(8 << 20,))


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
