"""What the router shows and what the nodes have counted is the same, after mixed requests and faults."""

import asyncio
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from decode_node.config import LocalPrefillConfig
from headrace.wire.node_messages import NodeStatus
from node_runtime.config import FetchConfig
from tests.support.cluster.asking import ASK_TIMEOUT_S
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.nodes import status_of, total
from tests.support.engine.oracle import random_prompt
from tests.support.patience import PATIENCE_S

FETCH = {"fetch_from_others": FetchConfig(min_tokens=1, max_time_ratio=1e9)}
LOCAL_TO_48 = {"local_prefill": LocalPrefillConfig(max_tokens=48)}
CALM = {"landing_timeout_s": PATIENCE_S}  # a busy machine's delays must not repeat a prefill
SHORT, LONG = 24, 250
NUM_REQUESTS = 30  # before the first fault, and about each
NUM_LONG = 4
STARTS = [random_prompt(length, seed=length) for length in (40, 90, 150)]
"""Shared beginnings of the prompts."""


@dataclass
class Load:
    """Mixed requests of one client, and what it got for them."""

    url: str
    seed: int
    num_choices: int = 0
    num_answered: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_generating: int = 0
    answers: list[list[int]] = field(default_factory=list)

    async def send(self, count: int, *, with_faults: bool = False) -> None:
        """Eight at a time. Every fifth has two choices, every seventh is scored; with faults every third leaves."""
        gate = asyncio.Semaphore(8)
        async with httpx.AsyncClient(base_url=self.url, timeout=ASK_TIMEOUT_S) as client:

            async def one(index: int) -> None:
                async with gate:
                    body = self._body(index)
                    if with_faults and index % 3 == 0:
                        self.num_choices += body["n"]
                        await _leave(client, body)
                    else:
                        await self.ask(client, body)

            await asyncio.gather(*(one(index) for index in range(count)))

    def _body(self, index: int) -> dict[str, Any]:
        rng = random.Random(self.seed * 1000 + index)
        new = [rng.randrange(5, 512) for _ in range(rng.randint(2, 40))]
        goes_on = self.answers and index % 2
        prompt = [*(rng.choice(self.answers) if goes_on else rng.choice(STARTS)), *new]
        scored: dict[str, Any] = {"echo": True, "logprobs": 1} if index % 7 == 3 else {}
        return {
            "prompt": prompt,
            "max_tokens": 0 if index % 14 == 3 else rng.randint(2, SHORT),
            "n": 2 if index % 5 == 4 else 1,
            "temperature": 1,
            "seed": index,
            "ignore_eos": True,
            "return_token_ids": True,
            **scored,
        }

    async def ask_long(self, client: httpx.AsyncClient) -> None:
        await self.ask(client, self._body(0) | {"max_tokens": LONG})

    async def ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self.num_choices += body["n"]
        reply = await client.post("/v1/completions", json=body)
        if reply.status_code != 200:
            assert reply.status_code >= 500, reply.text
            self.num_failed += body["n"]
            return
        content = reply.json()
        self.num_answered += len(content["choices"])
        self.prompt_tokens += len(body["prompt"]) * len(content["choices"])
        self.generated_tokens += content["usage"]["completion_tokens"]
        self.num_generating += len(content["choices"]) if body["max_tokens"] else 0
        if not body.get("echo"):
            self.answers.append([*body["prompt"], *content["choices"][0]["token_ids"]][:400])


async def _leave(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Leaves a stream when its first token has come."""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": LONG}) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                assert "choices" in json.loads(line.removeprefix("data: ")), line
                return


async def replace_in_mid_answer(cluster: Cluster, load: Load, victim: str) -> None:
    """Kills the node while it has a part in a long answer, and starts another under its name."""
    asking: list[asyncio.Task[None]] = []
    async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client:
        async with asyncio.timeout(PATIENCE_S):
            while not await _is_amid_a_long_answer(client, victim):
                if all(task.done() for task in asking):
                    asking += [asyncio.create_task(load.ask_long(client)) for _ in range(NUM_LONG)]
                await asyncio.sleep(0.02)
        cluster.processes[victim].kill()
        await asyncio.to_thread(cluster.processes[victim].wait)
        await asyncio.to_thread(cluster.start_node, victim)
        await asyncio.gather(*asking)


async def _is_amid_a_long_answer(client: httpx.AsyncClient, node: str) -> bool:
    rows = (await client.get("/cluster")).json()["requests"]
    return any(
        node in (row["prefill_node"], row["decode_node"])
        and row["phase"] == "decoding"
        and SHORT < row["generated_tokens"] < LONG // 2
        for row in rows
    )


@dataclass(frozen=True)
class Counted:
    """All counters at rest.

    nodes    by node, as it says itself
    router   the router's own, by name and its one label's value
    """

    nodes: dict[str, dict[str, float]]
    router: dict[tuple[str, str], float]

    def sum(self, name: str, role: str = "") -> float:
        """Of a counter over its labels and the nodes of a role (p, d)."""
        return sum(total(counters, name) for node, counters in self.nodes.items() if node.startswith(role))

    def labelled(self, name: str, role: str = "") -> float:
        """Of a counter with these labels."""
        return sum(counters[name] for node, counters in self.nodes.items() if node.startswith(role))

    def own(self, name: str, label: str = "") -> float:
        return self.router.get((f"headrace_{name}_total", label), 0.0)


async def at_rest(cluster: Cluster) -> Counted:
    """The counters once nothing runs and the router shows what each node has counted: it must come to that."""
    async with httpx.AsyncClient(base_url=cluster.url) as client, asyncio.timeout(PATIENCE_S):
        while True:
            shown = (await client.get("/cluster")).json()
            exposed = _samples((await client.get("/metrics")).text)
            statuses = {node["name"]: await _status(node["address"]) for node in shown["nodes"]}
            counted = {name: dict(status.counters) for name, status in statuses.items() if status is not None}
            idle = all(s and not (s.running or s.waiting or s.blocks.in_use) for s in statuses.values())
            is_open = sum(shown["phases"].values()) - shown["phases"]["done"] - shown["phases"]["failed"]
            is_shown = {node["name"]: node["counters"] for node in shown["nodes"]} == counted
            if idle and is_shown and not is_open and _exposes(exposed, counted):
                break
            await asyncio.sleep(0.1)
    for row in shown["hits"]:
        counters = counted[row["node"]]
        assert row["hit_tokens"] == counters[f"{row['group']}/hit_tokens"], row
        assert row["looked_up_tokens"] == counters[f"{row['group']}/looked_up_tokens"] >= row["hit_tokens"], row
    router = {
        (name, next((value for _, value in labels), "")): value
        for (name, labels), value in exposed.items()
        if name.startswith("headrace_") and len(labels) <= 1
    }
    return Counted(counted, router)


async def _status(address: str) -> NodeStatus | None:
    """None: the node was killed, and the router does not know it yet."""
    try:
        return await status_of(address)
    except grpc.aio.AioRpcError:
        return None


def _samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def _exposes(
    exposed: dict[tuple[str, frozenset[tuple[str, str]]], float], counted: dict[str, dict[str, float]]
) -> bool:
    for node, counters in counted.items():
        for counter, value in counters.items():
            prefix, _, name = counter.rpartition("/")
            labels = dict(part.split("=") if "=" in part else ("group", part) for part in prefix.split(",") if part)
            labels |= {"node": node, "role": "prefill" if node.startswith("p") else "decode"}
            if exposed.get((f"headrace_node_{name}_total", frozenset(labels.items()))) != value:
                return False
    return True


def assert_all_of_it_adds_up(load: Load, counted: Counted) -> None:
    """Without faults every token is drawn once and every prompt's token is cached or computed once."""
    assert load.num_failed == 0
    assert counted.own("requests", "completed") == load.num_answered == load.num_choices
    assert counted.own("tokens", "prompt") == load.prompt_tokens
    assert counted.own("tokens", "generated") == load.generated_tokens == counted.sum("sampled_tokens")
    assert counted.own("migrations") == counted.sum("preemptions") == counted.sum("transfer_failures") == 0
    # Each request is computed by the prefill node that looked its prompt up, or by the decode node itself.
    assert counted.labelled("attention/lookups", "p") + counted.sum("local_requests", "d") == load.num_choices
    assert counted.own("tokens", "cached") == counted.sum("resumable_tokens")
    decoded = load.generated_tokens - load.num_generating  # an answer's last token is never computed
    assert counted.sum("computed_tokens") == load.prompt_tokens - counted.sum("resumable_tokens") + decoded
    # What one end of a transfer has sent, the other has received: hand-overs and fetches.
    assert counted.sum("fetches", "p") > 0 and counted.labelled("state/fetched_tokens", "p") > 0
    for name in ("transfer_sessions", "group=attention/transfer_bytes", "group=state/transfer_bytes"):
        group, _, counter = name.rpartition("/")
        sent, received = (
            counted.labelled(f"{','.join(filter(None, (f'direction={way}', group)))}/{counter}")
            for way in ("sent", "received")
        )
        assert sent == received > 0, name
    assert counted.sum("fetches_served") == counted.sum("fetches")
    handed_over = counted.labelled("direction=sent/transfer_sessions") - counted.sum("fetches")
    assert handed_over == counted.sum("remote_requests", "d")


def assert_faults_are_counted(load: Load, before: Counted, after: Counted) -> None:
    """Requests end once each. Nodes draw what clients get, and more: for those that left, and for repeated work."""
    outcomes = [after.own("requests", outcome) for outcome in ("completed", "failed", "cancelled")]
    assert sum(outcomes) == load.num_choices
    assert outcomes[0] >= load.num_answered > before.own("requests", "completed")
    assert outcomes[2] > 0, "some have left"
    assert after.own("tokens", "generated") >= load.generated_tokens
    assert after.own("migrations") >= before.own("migrations")


@pytest.mark.slow
@pytest.mark.parametrize("victims", [["d1"], ["d1", "p1", "d0", "p0", "d1"]], ids=["60 requests", "180 requests"])
async def test_the_routers_and_the_nodes_counters_agree(victims: list[str], tiny_checkpoint, tmp_path: Path) -> None:
    with Cluster(
        tiny_checkpoint("granite"),
        tmp_path,
        num_prefill=2,
        num_decode=2,
        prefill=FETCH,
        decode=LOCAL_TO_48,
        router=CALM,
    ) as cluster:
        load = Load(cluster.url, seed=1)
        await load.send(NUM_REQUESTS)
        counted = await at_rest(cluster)
        assert_all_of_it_adds_up(load, counted)
        for victim in victims:
            async with asyncio.TaskGroup() as group:
                group.create_task(load.send(NUM_REQUESTS - NUM_LONG, with_faults=True))
                group.create_task(replace_in_mid_answer(cluster, load, victim))
            before, counted = counted, await at_rest(cluster)
            assert_faults_are_counted(load, before, counted)
