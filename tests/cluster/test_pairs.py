"""Nodes that cannot hand over to each other in one cluster: the router pairs the others, and every answer is right."""

from pathlib import Path

import httpx

from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.device_cluster import DeviceCluster
from tests.support.engine.oracle import greedy, random_prompt
from tests.support.patience import PATIENCE_S

PROMPTS = [random_prompt(length, seed=length) for length in (5, 40, 300, 301)]


async def paths(cluster: Cluster) -> set[tuple[str, str | None, str]]:
    answers = await ask_all(cluster.url, PROMPTS, at_once=2)
    assert [answer.tokens for answer in answers] == [greedy(cluster.model, prompt, 64) for prompt in PROMPTS]
    assert {answer.report["migrations"] for answer in answers} == {0}
    reports = [answer.report for answer in answers]
    return {(it["path"], (it["prefill"] or {}).get("node"), it["decode"]["node"]) for it in reports}


async def test_a_decode_node_that_no_prefill_node_can_hand_over_to_computes_its_prompts(
    tiny_checkpoint, tmp_path: Path
) -> None:
    with DeviceCluster(tiny_checkpoint("granite"), tmp_path, num_decode=2, devices={"d0": "cuda"}) as cluster:
        assert {(path, decode) for path, _, decode in await paths(cluster)} == {("local", "d0"), ("remote", "d1")}
        links = httpx.get(f"{cluster.url}/cluster", timeout=PATIENCE_S).json()["links"]
        errors = {(link["from"], link["to"]): link["error"] for link in links if link["error"] is not None}
        assert "run prefill and decode nodes on one kind of device" in errors["p0", "d0"]


async def test_a_prefill_node_that_cannot_hand_over_to_a_decode_node_is_not_asked(
    tiny_checkpoint, tmp_path: Path
) -> None:
    with DeviceCluster(tiny_checkpoint("granite"), tmp_path, num_prefill=2, devices={"p0": "cuda"}) as cluster:
        assert await paths(cluster) == {("remote", "p1", "d0")}
