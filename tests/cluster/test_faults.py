"""Nodes die, clients go away: the others' answers stay right, and everything held comes back."""

import asyncio
import random
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.cluster.asking import ASK_TIMEOUT_S, ask, ask_all
from tests.support.cluster.cluster import SHORT_SILENCE_S, Cluster, wait_until, with_engine
from tests.support.engine.oracle import clear_prompt, greedy, random_prompt
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow


async def slow_ask(cluster: Cluster, prompt: list[int]):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client:
        return await ask(client, prompt)


@pytest.mark.parametrize("family", ["granite", "qwen35"])
async def test_a_prefill_node_killed_during_prefill_costs_no_request(family, tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint(family)
    prompt = clear_prompt(model, 3000, 64, seed=4)
    # Small steps make the prefill last seconds, so that the kill falls into it.
    slow = with_engine(max_step_tokens=4, max_running=4)
    with Cluster(model, tmp_path, num_prefill=2, prefill={"engine": slow}) as cluster:
        asking = asyncio.create_task(slow_ask(cluster, prompt))
        await asyncio.to_thread(wait_until, lambda: cluster.nodes()["p0"]["running"] == 1, "p0 prefills")
        cluster.processes["p0"].kill()
        answer = await asking
        assert answer.report["prefill"]["node"] == "p1"
        assert answer.tokens == greedy(model, prompt, 64)
        wait_until(lambda: sorted(cluster.nodes()) == ["d0", "p1"], "the dead node is gone from /cluster")
        cluster.idle_nodes(["d0", "p1"])
        cluster.processes.pop("p0").wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_decode_node_that_dies_or_stops_while_decoding_costs_no_token(how, tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint("qwen35")
    prompt = random_prompt(100, seed=5)
    with Cluster(model, tmp_path, num_decode=2, silence_s=SHORT_SILENCE_S) as cluster:
        asking = asyncio.create_task(ask_all(cluster.url, [prompt], at_once=1, num_tokens=1500))
        await asyncio.to_thread(wait_until, lambda: cluster.nodes()["d0"]["running"] == 1, "d0 decodes")
        cluster.processes["d0"].kill(how)
        # gRPC by itself waits a minute for the answer to a ping.
        await asyncio.to_thread(wait_until, lambda: cluster.nodes()["d1"]["running"] == 1, "d1 goes on", 30)
        (answer,) = await asking
        assert answer.tokens == greedy(model, prompt, 1500)
        assert answer.report["migrations"] == 1
        cluster.processes["d0"].kill()
        cluster.processes.pop("d0").wait()


async def test_a_node_that_pauses_for_less_than_control_silence_s_keeps_its_requests(tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint("qwen35")
    prompt = random_prompt(100, seed=5)
    with Cluster(model, tmp_path, num_decode=2, silence_s=PATIENCE_S) as cluster:
        asking = asyncio.create_task(ask_all(cluster.url, [prompt], at_once=1, num_tokens=1500))
        await asyncio.to_thread(wait_until, lambda: cluster.nodes()["d0"]["running"] == 1, "d0 decodes")
        cluster.processes["d0"].kill(signal.SIGSTOP)
        await asyncio.sleep(4.0)  # twice as long as a node with the default setting may pause
        assert not asking.done()
        cluster.processes["d0"].kill(signal.SIGCONT)
        (answer,) = await asking
        assert answer.tokens == greedy(model, prompt, 1500)
        assert answer.report["migrations"] == 0
        wait_until(lambda: cluster.nodes()["d0"]["state"] == "live", "it gets work again")


async def test_a_killed_node_that_is_started_again_serves_again(tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint("granite")
    with Cluster(model, tmp_path) as cluster:
        before = cluster.nodes()["d0"]["incarnation"]
        cluster.processes.pop("d0").kill()
        cluster.start_node("d0")
        wait_until(lambda: cluster.nodes().get("d0", {}).get("incarnation") not in (None, before), "d0 is back")
        (answer,) = await ask_all(cluster.url, [random_prompt(70)], at_once=1)
        assert answer.tokens == greedy(model, random_prompt(70), 64)


async def test_pools_return_to_their_start_after_500_requests_a_third_of_them_aborted(
    tiny_checkpoint, tmp_path: Path
) -> None:
    dice = random.Random(0)
    shared = random_prompt(150, seed=6)
    completed = 0

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal completed
        prompt = shared[: dice.randrange(150)] + random_prompt(dice.randrange(1, 200), seed=number)
        body = {"prompt": prompt, "max_tokens": dice.randrange(1, 24), "stream": True, "ignore_eos": True}
        is_aborted = number % 3 == 0
        patience_s = dice.uniform(0, 0.4) if is_aborted else ASK_TIMEOUT_S
        try:
            async with asyncio.timeout(patience_s), client.stream("POST", "/v1/completions", json=body) as reply:
                lines = [line async for line in reply.aiter_lines()]
                assert reply.status_code == 200 and "data: [DONE]" in lines
                completed += 1
        except TimeoutError:
            assert is_aborted

    engine = with_engine(cache_bytes=8 << 20)
    with Cluster(tiny_checkpoint("granite"), tmp_path, engine=engine) as cluster:
        totals = {name: node["blocks"]["total"] for name, node in cluster.nodes().items()}
        gate = asyncio.Semaphore(8)

        async def gated(client: httpx.AsyncClient, number: int) -> None:
            async with gate:
                await one(client, number)

        async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client:
            await asyncio.gather(*(gated(client, number) for number in range(500)))
        assert 333 <= completed < 500
        for name, node in cluster.idle_nodes(["d0", "p0"]).items():
            for pool in ("blocks", "slots"):
                counts = node[pool]
                assert counts["free"] + counts["cached"] == counts["total"]
            assert node["blocks"]["total"] == totals[name]
