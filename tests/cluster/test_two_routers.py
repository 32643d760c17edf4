"""Two routers serve the same nodes; one of them dies, or comes back."""

import asyncio
import signal
from typing import Any

import httpx
import pytest

from tests.support.cluster.asking import ASK_TIMEOUT_S, ask, ask_all
from tests.support.cluster.cluster import Cluster, wait_until
from tests.support.engine.oracle import greedy, random_prompt
from tests.support.patience import PATIENCE_S

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


ID = {"x-request-id": "order-17"}
NUM_TOKENS = 600


async def begin(url: str, prompt: list[int], *, num_tokens: int, headers: dict[str, str]) -> asyncio.Task[None]:
    """Asks in the background; the router is lost before the answer ends."""

    async def asking() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=ASK_TIMEOUT_S, headers=headers) as client:
            with pytest.raises(httpx.HTTPError):
                await ask(client, prompt, num_tokens)

    return asyncio.create_task(asking())


async def go_on(url: str, prompt: list[int], **more: Any) -> Any:
    async with httpx.AsyncClient(base_url=url, timeout=ASK_TIMEOUT_S, headers=ID) as client:
        return await ask(client, prompt, NUM_TOKENS, **more)


def generated(url: str) -> int:
    requests = httpx.get(f"{url}/cluster").json()["requests"]
    return max((row["generated_tokens"] for row in requests), default=0)


@pytest.mark.parametrize("where", ["another router", "the router, restarted"])
async def test_an_answer_goes_on_where_it_was_when_its_id_is_asked_for_again(where, tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint("qwen35")
    prompt = random_prompt(100, seed=5)
    wanted = greedy(model, prompt, NUM_TOKENS)
    with Cluster(model, tmp_path, num_routers=2, decode={"orphan_timeout_s": PATIENCE_S}) as cluster:
        first, second = cluster.urls
        asking = await begin(first, prompt, num_tokens=NUM_TOKENS, headers=ID)
        await asyncio.to_thread(wait_until, lambda: generated(first) >= 100, "100 tokens are shown")
        cluster.processes["router"].kill()
        await asking
        cluster.processes["router"].wait()
        if where == "the router, restarted":
            cluster.restart_router()
            second = first
        await asyncio.to_thread(
            wait_until, lambda: cluster.nodes(second).get("d0", {}).get("orphans") == 1, "the router knows of it"
        )
        answer = await go_on(second, prompt)
        assert answer.tokens == wanted
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == len(prompt)
        nodes = cluster.idle_nodes(["d0", "p0"], second)
        computed = {name: node["counters"]["computed_tokens"] for name, node in nodes.items()}
        assert computed["p0"] == len(prompt), "the prompt was computed once"
        # The first token comes from the prefill node; the last one is sampled and not computed.
        assert nodes["d0"]["counters"]["sampled_tokens"] == NUM_TOKENS - 1, "no token of the answer was computed twice"
        assert nodes["d0"]["counters"]["orphans_adopted"] == 1


LONG = 1800
"""Tokens of answers that take longer than the tests wait."""


async def test_nodes_register_again_with_a_restarted_router_and_give_back_what_nobody_asks_for(
    tiny_checkpoint, tmp_path
) -> None:
    model, prompt = tiny_checkpoint("qwen35"), random_prompt(100, seed=5)
    with Cluster(model, tmp_path, decode={"orphan_timeout_s": 2.0}) as cluster:
        headers = [{}, {}, {"x-request-id": "a"}, {"x-request-id": "b"}]
        asking = [await begin(cluster.url, prompt, num_tokens=LONG, headers=each) for each in headers]
        await asyncio.to_thread(wait_until, lambda: cluster.nodes()["d0"]["running"] == 4, "all of them decode")
        cluster.processes["router"].kill()
        await asyncio.gather(*asking)
        cluster.processes["router"].wait()
        cluster.restart_router()
        wait_until(lambda: sorted(cluster.nodes()) == ["d0", "p0"], "the nodes are registered again")
        nodes = cluster.idle_nodes(["d0", "p0"])
        counters = nodes["d0"]["counters"]
        assert (counters["orphans_kept"], counters["orphans_adopted"], nodes["d0"]["orphans"]) == (2, 0, 0)
        assert counters["sampled_tokens"] < 4 * LONG, "released before their ends"


@pytest.mark.parametrize("who", ["client", "router"])
async def test_a_call_that_is_ended_on_purpose_leaves_no_orphan(who: str, tiny_checkpoint, tmp_path) -> None:
    """The client leaves, or the router is stopped: the node can tell both from a router that is lost."""
    model, prompt = tiny_checkpoint("qwen35"), random_prompt(100, seed=5)
    settings = {"decode": {"orphan_timeout_s": PATIENCE_S}, "router": {"shutdown_grace_s": 0.5}}
    with Cluster(model, tmp_path, num_routers=2, **settings) as cluster:
        first, second = cluster.urls
        asking = await begin(first, prompt, num_tokens=LONG, headers=ID)
        await asyncio.to_thread(wait_until, lambda: cluster.nodes(second)["d0"]["running"] == 1, "it decodes")
        if who == "client":
            asking.cancel()
        else:
            cluster.processes["router"].kill(signal.SIGTERM)
        await asyncio.gather(asking, return_exceptions=True)
        nodes = cluster.idle_nodes(["d0", "p0"], second)
        assert nodes["d0"]["counters"]["orphans_kept"] == 0
        assert nodes["d0"]["counters"]["sampled_tokens"] < LONG
