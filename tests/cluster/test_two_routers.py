"""Two routers serve the same nodes; one of them dies."""

import asyncio

import pytest

from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import Cluster, wait_until
from tests.support.engine.oracle import greedy, random_prompt

pytestmark = pytest.mark.slow


async def test_a_router_that_is_killed_costs_the_other_ones_requests_nothing(tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint("qwen35")
    prompt = random_prompt(100, seed=5)
    wanted = greedy(model, prompt, 600)
    with Cluster(model, tmp_path, num_routers=2) as cluster:
        kept = cluster.urls[1]
        both = [asyncio.create_task(ask_all(url, [prompt] * 4, at_once=4, num_tokens=600)) for url in cluster.urls]

        def all_decode() -> bool:
            node = cluster.nodes(kept)["d0"]
            return node["running"] == 8 and sorted(node["calls"].values()) == [4, 4]

        await asyncio.to_thread(wait_until, all_decode, "each router has four calls, and all requests decode")
        cluster.processes["router"].kill()
        cut, whole = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(cut, Exception), "the killed router answered"
        assert not isinstance(whole, BaseException), whole
        assert [answer.tokens for answer in whole] == [wanted] * 4
        assert {answer.report["migrations"] for answer in whole} == {0}
        nodes = cluster.idle_nodes(["d0", "p0"], kept)
        assert {name: node["calls"] for name, node in nodes.items()} == {"d0": {}, "p0": {}}
        cluster.processes.pop("router").wait()
