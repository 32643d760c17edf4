"""A decode node that stands still for longer than routers wait, and then goes on."""

import asyncio
import signal

import httpx
import pytest

from tests.support.cluster.asking import ASK_TIMEOUT_S, ask
from tests.support.cluster.cluster import SHORT_SILENCE_S, Cluster, wait_until
from tests.support.engine.oracle import greedy, random_prompt
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

NUM_TOKENS = 1500


async def test_a_node_gives_up_what_its_router_moved_while_it_stood_still(tiny_checkpoint, tmp_path) -> None:
    """The stopped node takes its router for lost when it goes on, and would keep the request for another one."""
    model, prompt = tiny_checkpoint("qwen35"), random_prompt(100, seed=5)
    decode = {"orphan_timeout_s": 10 * PATIENCE_S}
    with Cluster(model, tmp_path, num_decode=2, decode=decode, silence_s=SHORT_SILENCE_S) as cluster:
        headers = {"x-request-id": "order-17"}
        async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S, headers=headers) as client:
            asking = asyncio.create_task(ask(client, prompt, NUM_TOKENS))
            await asyncio.to_thread(wait_until, lambda: cluster.nodes()["d0"]["running"] == 1, "d0 decodes")
            cluster.processes["d0"].kill(signal.SIGSTOP)
            await asyncio.to_thread(wait_until, lambda: cluster.nodes()["d1"]["running"] == 1, "d1 goes on")
            cluster.processes["d0"].kill(signal.SIGCONT)
            answer = await asking
        assert answer.tokens == greedy(model, prompt, NUM_TOKENS)
        nodes = cluster.idle_nodes(["d0", "d1", "p0"])
        counters = nodes["d0"]["counters"]
        assert counters["orphans_kept"] == 1, "d0 took its router for lost"
        assert counters["sampled_tokens"] < NUM_TOKENS
