"""Roles that change under load: at once for new requests, and nothing of the running ones is lost."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.cluster.asking import ASK_TIMEOUT_S, Answered, ask
from tests.support.cluster.cluster import Cluster, wait_until
from tests.support.engine.oracle import clear_prompt, greedy
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

Begun = tuple[float, int, Answered]
"""When a request began, which prompt it was, and its answer."""

ANSWER_TOKENS = 40
HEARTBEAT_S = 20.0
EFFECT_S = 10.0
"""For a switch, and for other routers to know of it: what waited for the next heartbeat would often take longer."""


@pytest.fixture(scope="module")
def model(tiny_checkpoint) -> Path:
    return tiny_checkpoint("granite")


async def switch(url: str, name: str, role: str) -> float:
    """Seconds until the router confirms it."""
    began_s = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        reply = await client.post(f"/cluster/nodes/{name}/role", json={"role": role})
    assert reply.status_code == 200, reply.text
    return time.monotonic() - began_s


def roles(cluster: Cluster, url: str) -> dict[str, str]:
    return {name: node["role"] for name, node in cluster.nodes(url).items()}


async def until_roles(cluster: Cluster, url: str, wanted: dict[str, str], timeout_s: float = EFFECT_S) -> None:
    await asyncio.to_thread(wait_until, lambda: roles(cluster, url) == wanted, f"{url} knows {wanted}", timeout_s)


@asynccontextmanager
async def clients(url: str, prompts: list[list[int]], answers: list[Begun]) -> AsyncIterator[None]:
    """Four clients that ask all the time, into `answers`. Leaving waits for the last ones, and raises any's error."""
    stopped = asyncio.Event()

    async def asking(first: int) -> None:
        number = first
        while not stopped.is_set():
            index = number % len(prompts)
            began_s = time.monotonic()
            answers.append((began_s, index, await ask(client, prompts[index], ANSWER_TOKENS)))
            number += 1

    async with httpx.AsyncClient(base_url=url, timeout=ASK_TIMEOUT_S) as client, asyncio.TaskGroup() as tasks:
        for first in range(4):
            tasks.create_task(asking(first * 3))
        try:
            yield
        finally:
            stopped.set()


async def until_answered(answers: list[Begun], more: int) -> None:
    wanted = len(answers) + more
    async with asyncio.timeout(PATIENCE_S):
        while len(answers) < wanted:
            await asyncio.sleep(0.02)


async def test_a_switch_under_load_takes_effect_at_once_and_loses_nothing(model, tmp_path) -> None:
    prompts = [clear_prompt(model, 60 + 20 * seed, ANSWER_TOKENS, seed) for seed in range(12)]
    wanted = [greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts]
    with Cluster(model, tmp_path, num_prefill=1, num_decode=2) as cluster:
        answers: list[Begun] = []
        async with clients(cluster.url, prompts, answers):
            await until_answered(answers, 8)
            to_prefill_s = await switch(cluster.url, "d1", "prefill")
            prefills_s = time.monotonic()
            await until_answered(answers, 16)
            to_decode_s = await switch(cluster.url, "d1", "decode")
            decodes_s = time.monotonic()
            await until_answered(answers, 16)
        print(f"{len(answers)} answers; switched after {to_prefill_s:.3f} and {to_decode_s:.3f} s")
        assert max(to_prefill_s, to_decode_s) < EFFECT_S
        assert [answer.tokens for _, _, answer in answers] == [wanted[index] for _, index, _ in answers]
        assert {answer.report["migrations"] for _, _, answer in answers} == {0}
        between = [answer.report for began_s, _, answer in answers if prefills_s <= began_s < decodes_s - to_decode_s]
        after = [answer.report for began_s, _, answer in answers if began_s >= decodes_s]
        assert between and {report["decode"]["node"] for report in between} == {"d0"}
        assert "d1" in {report["prefill"]["node"] for report in between}
        assert {report["prefill"]["node"] for report in after} == {"p0"}
        assert "d1" in {report["decode"]["node"] for report in after}
        cluster.idle_nodes(["d0", "d1", "p0"])


async def test_routers_agree_on_roles_and_a_restarted_one_knows_them(model, tmp_path) -> None:
    with Cluster(model, tmp_path, num_decode=2, num_routers=2, router={"heartbeat_s": HEARTBEAT_S}) as cluster:
        first, second = cluster.urls
        await switch(first, "d1", "prefill")
        wanted = {"p0": "prefill", "d0": "decode", "d1": "prefill"}
        assert roles(cluster, first) == wanted
        await until_roles(cluster, second, wanted)
        await switch(second, "d1", "both")
        wanted["d1"] = "both"
        await until_roles(cluster, first, wanted)
        cluster.processes["router"].kill()
        cluster.processes["router"].wait()
        cluster.restart_router()
        await until_roles(cluster, first, wanted, PATIENCE_S)


async def test_the_planner_gives_a_load_of_long_prompts_another_prefill_node(model: Path, tmp_path: Path) -> None:
    router = {"role_planner": True, "role_window_s": 5.0}
    with Cluster(model, tmp_path, num_decode=3, router=router) as cluster:
        prompts = [clear_prompt(model, 600, 2, seed) for seed in range(8)]
        answers: list[Answered] = []

        async def asking(number: int) -> None:
            while "prefill" not in {role for name, role in roles(cluster, cluster.url).items() if name != "p0"}:
                unlike_others = {"headrace": {"salt": f"{number} {len(answers)}"}}
                answers.append(await ask(client, prompts[number], 2, **unlike_others))
                assert answers[-1].tokens == expected[number]

        expected = [greedy(model, prompt, 2) for prompt in prompts]
        async with (
            httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client,
            asyncio.timeout(PATIENCE_S),
        ):
            await asyncio.gather(*(asking(number) for number in range(len(prompts))))
            assert answers
            await asyncio.gather(*(ask(client, prompt, 2) for prompt in prompts))
