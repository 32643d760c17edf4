"""The router's index of a real cluster is what the nodes hold, whatever becomes of them; /metrics tells of both."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.wire.cache_updates import CacheSnapshotPart
from headrace.wire.client import GrpcNodeClient
from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import SHORT_SILENCE_S, Cluster, with_engine
from tests.support.engine.oracle import random_prompt
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

SETTLE_S = PATIENCE_S


@pytest.fixture(scope="module")
def cluster(tiny_checkpoint, tmp_path_factory) -> Iterator[Cluster]:
    """Some 60 blocks and 22 slots a node: a few prompts of 200 tokens are more than it holds."""
    engine = with_engine(cache_bytes=1_200_000, state_share=0.8, max_running=4)
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(tiny_checkpoint("granite"), folder, num_decode=2, engine=engine, silence_s=SHORT_SILENCE_S) as running:
        yield running


async def held(node: dict[str, Any]) -> CacheSnapshotPart:
    """What the node itself says that it holds."""
    client = GrpcNodeClient(node["name"], node["address"])
    try:
        async with asyncio.timeout(PATIENCE_S), client.cache_updates() as call:
            part = await anext(aiter(call))
            assert isinstance(part, CacheSnapshotPart) and part.is_last
            return part
    finally:
        await client.close()


async def settled(cluster: Cluster) -> dict[str, Any]:
    """The nodes once their heartbeats and the index have come to rest, which they must."""
    async with asyncio.timeout(SETTLE_S):
        while True:
            nodes = await asyncio.to_thread(cluster.nodes)
            if all([await _agrees(node) for node in nodes.values()]):
                return nodes
            await asyncio.sleep(0.1)


async def _agrees(node: dict[str, Any]) -> bool:
    index, truth = node["index"], await held(node)
    idle = node["blocks"]["in_use"] == node["slots"]["in_use"] == 0
    known = (index["sequence"], index["blocks"], index["checkpoints"])
    reported = (node["counters"]["cache_changes"], node["blocks"]["cached"], node["slots"]["cached"])
    return (
        idle and index["is_followed"] and index["lag"] == 0
        and known == reported == (truth.sequence, len(truth.blocks), len(truth.checkpoints))
    )  # fmt: skip


async def metrics(cluster: Cluster) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By name and labels."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        text = (await http.get("/metrics")).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


async def test_after_requests_after_evictions_and_after_a_restart(cluster: Cluster) -> None:
    await ask_all(cluster.url, [random_prompt(100), random_prompt(100, seed=1)], at_once=1, num_tokens=20)
    nodes = await settled(cluster)
    assert nodes["p0"]["index"]["blocks"] == 2 * 6 and nodes["p0"]["index"]["checkpoints"] > 0
    assert [nodes[name]["index"]["blocks"] for name in ("d0", "d1")] == [7, 7]  # 119 tokens each

    await ask_all(cluster.url, [random_prompt(200, seed=seed) for seed in range(24)], at_once=4, num_tokens=20)
    nodes = await settled(cluster)
    for name, node in nodes.items():
        assert node["counters"]["attention/evictions"] > 0, f"{name} was under no pressure"
        assert node["index"]["blocks"] > 30

    cluster.processes["d0"].kill(signal.SIGKILL)
    cluster.processes["d0"].wait()
    before = nodes["d0"]["incarnation"]
    cluster.start_node("d0")
    async with asyncio.timeout(SETTLE_S):
        while (await asyncio.to_thread(cluster.nodes)).get("d0", {"incarnation": before})["incarnation"] == before:
            await asyncio.sleep(0.1)
    nodes = await settled(cluster)
    assert (nodes["d0"]["index"]["blocks"], nodes["d0"]["index"]["sequence"]) == (0, 0)
    await ask_all(cluster.url, [random_prompt(100, seed=seed) for seed in (50, 51)], at_once=1, num_tokens=20)
    nodes = await settled(cluster)
    assert nodes["d0"]["index"]["blocks"] == 7


async def test_a_node_that_was_silent_for_a_while_is_followed_again(cluster: Cluster) -> None:
    silent = cluster.processes["d1"]
    silent.kill(signal.SIGSTOP)
    try:
        async with asyncio.timeout(SETTLE_S):
            while "d1" in await asyncio.to_thread(cluster.nodes):
                await asyncio.sleep(0.1)
        await ask_all(cluster.url, [random_prompt(100, seed=60)], at_once=1, num_tokens=20)
    finally:
        silent.kill(signal.SIGCONT)
    await asyncio.to_thread(cluster.wait_for_nodes, 3)
    await ask_all(cluster.url, [random_prompt(100, seed=seed) for seed in (61, 62)], at_once=1, num_tokens=20)
    nodes = await settled(cluster)
    assert nodes["d1"]["index"]["blocks"] > 0


async def test_metrics_per_node_and_group(tiny_checkpoint, tmp_path: Path) -> None:
    """Two turns on one pair: 100 tokens and 28 more, then these 128 and 22 more, answers of 29 tokens."""
    with Cluster(tiny_checkpoint("granite"), tmp_path) as pair:
        (first,) = await ask_all(pair.url, [random_prompt(100)], at_once=1, num_tokens=29)
        prompt = [*random_prompt(100), *first.tokens, *random_prompt(21, seed=1)]
        assert len(prompt) == 150
        await settled(pair)
        (second,) = await ask_all(pair.url, [prompt], at_once=1, num_tokens=1 + 16)
        nodes = await settled(pair)
        found = await metrics(pair)

    def of(name: str, node: str, group: str = "") -> float:
        labels = {"node": node, "role": "prefill" if node == "p0" else "decode"}
        return found[f"headrace_{name}", frozenset((labels | ({"group": group} if group else {})).items())]

    report = second.report
    for node in ("p0", "d0"):
        assert of("node_lookups_total", node, "attention") == 2
        assert of("index_keys", node, "attention") == nodes[node]["index"]["blocks"]
        assert of("index_keys", node, "state") == nodes[node]["index"]["checkpoints"]
        indexed = {group: of("node_indexed", node, group) for group in ("attention", "state")}
        assert indexed == {group: of("index_keys", node, group) for group in indexed}
        assert of("node_tombstones", node) == indexed["attention"] - indexed["state"] > 0
        assert of("node_evictions_total", node, "attention") == of("node_evictions_total", node, "state") == 0
        assert of("node_checkpoints_evicted_unused_total", node) == 0
    # The decode node's states arrived: no lookup of its state group. Its blocks of the first turn did not move.
    assert of("node_looked_up_tokens_total", "d0", "attention") == 100 + 150
    assert of("node_hit_tokens_total", "d0", "attention") == report["decode"]["attention_hit_tokens"] == 128
    assert of("node_lookups_total", "d0", "state") == of("node_hit_tokens_total", "d0", "state") == 0
    assert of("node_remote_requests_total", "d0") == 2 and of("node_local_requests_total", "d0") == 0
    assert of("node_remote_hit_tokens_total", "d0") == 128
    assert of("node_bytes_not_moved_total", "d0") == 128 // 16 * 4096  # this model's blocks
    # The prefill node looks both groups up.
    assert of("node_looked_up_tokens_total", "p0", "state") == 99 + 149
    assert of("node_hit_tokens_total", "p0", "state") == report["prefill"]["state_hit_tokens"]
