"""A request that ends nodes, and nodes that take long to come back: what it costs the others."""

import asyncio
from dataclasses import dataclass

import httpx
import pytest

from tests.support.cluster.asking import ASK_TIMEOUT_S, ask, ask_all
from tests.support.cluster.cluster import Cluster, wait_until
from tests.support.cluster.process import Process
from tests.support.cluster.troubled_node import TroubledNode
from tests.support.engine.oracle import clear_prompt, greedy, random_prompt

pytestmark = pytest.mark.slow

POISON = 7


@dataclass
class TroubledCluster(Cluster):
    poison: int | None = None
    start_after_s: float = 0.0

    def _start_process(self, name: str, config: object) -> Process:
        if not name.startswith("router"):
            config = TroubledNode(config, self.poison, self.start_after_s)  # type: ignore[arg-type]
        return super()._start_process(name, config)


def test_a_request_whose_step_raises_costs_two_nodes_at_most_and_the_next_is_answered(
    tiny_checkpoint, tmp_path
) -> None:
    model = tiny_checkpoint("qwen35")
    prompt = clear_prompt(model, 60, 64, seed=1)
    assert prompt[:2] != [POISON, POISON]
    with TroubledCluster(model, tmp_path, num_prefill=2, num_decode=2, poison=POISON) as cluster:
        body = {"prompt": [POISON, POISON, *prompt], "max_tokens": 4}
        reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=ASK_TIMEOUT_S)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "node_crashed")
        assert reply.headers["x-should-retry"] == "false"
        (answer,) = asyncio.run(ask_all(cluster.url, [prompt], at_once=1))
        assert answer.tokens == greedy(model, prompt, 64)
        alive = [node for node in cluster.nodes().values() if node["state"] == "live"]
        assert len(alive) >= 2
        log = cluster.processes["router"].log.read_text()
        assert "quarantined" in log and "62 prompt tokens, {'max_tokens': 4" in log
        metrics = httpx.get(f"{cluster.url}/metrics", timeout=ASK_TIMEOUT_S).text
        assert "headrace_quarantined_requests_total 1.0" in metrics


async def test_requests_wait_for_the_only_decode_node_however_long_it_takes_to_start(tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint("qwen35")
    long, *short = random_prompt(100, seed=5), *(clear_prompt(model, 80, 64, seed=seed) for seed in (1, 2))
    with TroubledCluster(model, tmp_path) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client:
            before = asyncio.create_task(ask(client, long, 600))
            await asyncio.to_thread(wait_until, lambda: cluster.nodes()["d0"]["running"] > 0, "d0 decodes")
            cluster.processes.pop("d0").kill()
            cluster.start_after_s = 8.0  # longer than the router takes to forget a dead node
            starting = asyncio.create_task(asyncio.to_thread(cluster.start_node, "d0"))
            await asyncio.to_thread(wait_until, lambda: "d0" not in cluster.nodes(), "d0 is gone from /cluster")
            during = [asyncio.create_task(ask(client, prompt)) for prompt in short]
            answers = await asyncio.gather(before, *during)
            await starting
        expected = [greedy(model, long, 600), *(greedy(model, prompt, 64) for prompt in short)]
        assert [answer.tokens for answer in answers] == expected
