"""A busy decode node is drained: its running requests go on at another node, and nothing of them is computed again."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.cluster import Cluster, wait_until
from tests.support.engine.driving import GREEDY, request, serve, small_engine, submit
from tests.support.engine.oracle import random_prompt
from tests.support.patience import PATIENCE_S

NUM_TOKENS = 400
NUM_SEEDS = 9
DRAWN = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "logprobs": 2}


@pytest.fixture(scope="module")
def undisturbed(tiny_checkpoint) -> dict[tuple[int, bool], list[int]]:
    """An engine's own answers, by seed and whether they are drawn."""
    asked = {}
    for seed, is_drawn in product(range(NUM_SEEDS), (False, True)):
        sampling = replace(GREEDY, max_tokens=NUM_TOKENS, seed=seed, **(DRAWN if is_drawn else {}))
        asked[seed, is_drawn] = request(prompt_of(seed), sampling)
    built = small_engine(tiny_checkpoint("granite"))
    runs = {key: submit(built, each) for key, each in asked.items()}
    serve(built, *runs.values())
    return {key: run.tokens for key, run in runs.items()}


def prompt_of(seed: int) -> list[int]:
    return random_prompt(40 + seed, seed=seed)


@dataclass
class Streamed:
    """A streamed answer: its tokens, and the longest time between two of its events."""

    tokens: list[int] = field(default_factory=list)
    gap_s: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)


async def stream(client: httpx.AsyncClient, seed: int, num_tokens: int, **more: Any) -> Streamed:
    answer = Streamed()
    body = {
        "prompt": prompt_of(seed),
        "max_tokens": num_tokens,
        "temperature": 0,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "headrace": {"report": True},
    }
    last_s = None
    async with client.stream("POST", "/v1/completions", json=body | more) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            now_s = time.monotonic()
            answer.gap_s = max(answer.gap_s, 0.0 if last_s is None else now_s - last_s)
            last_s = now_s
            for choice in event["choices"]:
                answer.tokens += choice.get("token_ids") or []
            if event.get("usage"):
                answer.report = event["usage"]["headrace"]
    return answer


async def decoding_on(client: httpx.AsyncClient, node: str, count: int) -> None:
    """Waits until so many requests decode on the node, and have some tokens."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            rows = (await client.get("/cluster")).json()["requests"]
            here = [row for row in rows if row["decode_node"] == node and row["phase"] == "decoding"]
            if sum(row["generated_tokens"] > 3 for row in here) >= count:
                return
            await asyncio.sleep(0.01)


async def drained(client: httpx.AsyncClient, node: str, **body: Any) -> dict[str, Any]:
    reply = await client.post(f"/cluster/nodes/{node}/drain", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def client_of(cluster: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=64))


async def test_the_requests_of_a_drained_node_move_and_nothing_is_computed_again(
    tiny_checkpoint, tmp_path: Path, undisturbed
):
    with Cluster(tiny_checkpoint("granite"), tmp_path, num_decode=2) as cluster:
        async with client_of(cluster) as client:
            asked = [(seed, {} if seed % 2 else DRAWN) for seed in range(6)]
            running = [asyncio.create_task(stream(client, seed, NUM_TOKENS, **more)) for seed, more in asked]
            await decoding_on(client, "d0", 2)
            report = await drained(client, "d0", keep=True)
            assert report["recomputed"] == 0 and report["moved"] >= 2, report
            rows = (await client.get("/cluster")).json()
            assert {row["name"]: row["state"] for row in rows["nodes"]}["d0"] == "draining"
            answers = await asyncio.gather(*running)
            nodes = cluster.idle_nodes(["d0", "d1", "p0"])
            computed = sum(node["counters"]["computed_tokens"] for node in nodes.values())
            assert computed == sum(40 + seed + NUM_TOKENS - 1 for seed, _ in asked)
            moves = [answer.report["moves"] for answer in answers]
            assert sum(moves) == report["moved"] and {answer.report["migrations"] for answer in answers} == {0}
            gaps = sorted(round(answer.gap_s, 3) for answer, moved in zip(answers, moves, strict=True) if moved)
            print(f"{report}; longest gaps of the moved answers: {gaps} s")
            assert [answer.tokens for answer in answers] == [undisturbed[seed, bool(more)] for seed, more in asked]
            later = await asyncio.gather(*(stream(client, seed, 8, **more) for seed, more in asked))
            assert {answer.report["decode"]["node"] for answer in later} == {"d1"}, "d0 gets no work any more"


async def test_a_drained_node_ends(tiny_checkpoint, tmp_path: Path):
    with Cluster(tiny_checkpoint("granite"), tmp_path, num_decode=2) as cluster:
        async with client_of(cluster) as client:
            running = [asyncio.create_task(stream(client, seed, NUM_TOKENS)) for seed in range(4)]
            await decoding_on(client, "d1", 1)
            report = await drained(client, "d1")
            await asyncio.to_thread(cluster.processes["d1"].wait)
            assert cluster.processes["d1"].exit_status == 0
            assert set(cluster.nodes()) == {"d0", "p0"}
            answers = await asyncio.gather(*running)
            assert sum(answer.report["moves"] for answer in answers) == report["moved"] > 0
            refused = await client.post("/cluster/nodes/d0/drain", json={})
            assert refused.status_code == 409, "nobody else decodes"


@pytest.mark.slow
async def test_none_of_200_requests_is_lost_while_two_of_three_nodes_are_drained(tiny_checkpoint, tmp_path: Path):
    with Cluster(tiny_checkpoint("granite"), tmp_path, num_decode=3) as cluster:
        async with client_of(cluster) as client:
            gate = asyncio.Semaphore(8)

            async def asked(seed: int) -> Streamed:
                async with gate:
                    return await stream(client, seed, 64, prompt=random_prompt(20 + seed % 30, seed=seed))

            asking = asyncio.gather(*(asked(seed) for seed in range(200)))
            reports = []
            for node in ("d0", "d2"):
                await decoding_on(client, node, 1)
                reports.append(await drained(client, node))
            answers = await asking
            moved = [answer for answer in answers if answer.report["moves"]]
            longest_s = max(answer.gap_s for answer in moved)
            print(f"{reports}; {len(moved)} of 200 moved, with gaps of {longest_s:.3f} s at most")
            await asyncio.to_thread(wait_until, lambda: set(cluster.nodes()) == {"d1", "p0"}, "d0 and d2 end")
            assert {len(answer.tokens) for answer in answers} == {64}
            assert (
                sum(answer.report["migrations"] for answer in answers)
                == sum(each["recomputed"] for each in reports)
                == 0
            )
            undisturbed = await asyncio.gather(*(asked(seed) for seed in range(0, 200, 10)))
            assert [answer.tokens for answer in answers[::10]] == [answer.tokens for answer in undisturbed]


@pytest.mark.parametrize("victim", ["sender", "receiver"])
async def test_requests_whose_node_is_killed_in_the_middle_of_a_move_are_computed_again(
    tiny_checkpoint, tmp_path: Path, victim: str, undisturbed
):
    with Cluster(tiny_checkpoint("granite"), tmp_path, num_decode=3) as cluster:
        async with client_of(cluster) as client:
            running = [asyncio.create_task(stream(client, seed, NUM_TOKENS)) for seed in range(NUM_SEEDS)]
            await decoding_on(client, "d0", 2)
            draining = asyncio.create_task(client.post("/cluster/nodes/d0/drain", json={"keep": True}))
            killed = "d0" if victim == "sender" else "d1"
            async with asyncio.timeout(PATIENCE_S):
                while not draining.done() and not await has_moved_to(client, "d1"):
                    await asyncio.sleep(0.001)
            cluster.processes[killed].kill()
            answers = await asyncio.gather(*running)
            await draining
            assert [answer.tokens for answer in answers] == [undisturbed[seed, False] for seed in range(NUM_SEEDS)]


async def has_moved_to(client: httpx.AsyncClient, node: str) -> bool:
    rows = (await client.get("/cluster")).json()["requests"]
    return any((row["decode_node"] == node and row["phase"] in ("moving", "migrating")) or row["moves"] for row in rows)


async def test_the_requests_of_a_node_that_gets_sigterm_move(tiny_checkpoint, tmp_path: Path):
    decode = {"shutdown_grace_s": PATIENCE_S}  # a busy machine takes its time
    with Cluster(tiny_checkpoint("granite"), tmp_path, num_decode=2, decode=decode) as cluster:
        async with client_of(cluster) as client:
            running = [asyncio.create_task(stream(client, seed, NUM_TOKENS)) for seed in range(4)]
            await decoding_on(client, "d1", 1)
            await asyncio.to_thread(cluster.processes["d1"].stop)
            answers = await asyncio.gather(*running)
            assert sum(answer.report["moves"] for answer in answers) > 0
            assert {answer.report["migrations"] for answer in answers} == {0}
            assert {answer.report["decode"]["node"] for answer in answers} == {"d0"}
