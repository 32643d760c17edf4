"""Nodes that do the work of both roles: each prefills, decodes, sends to the other and receives from it."""

from pathlib import Path

import pytest

from prefill_node.config import FetchConfig
from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import ALWAYS_REMOTE, Cluster
from tests.support.engine.oracle import clear_prompt, greedy

pytestmark = pytest.mark.slow

ANSWER_TOKENS = 24
NARROW = {"staging_buffers": 1, "max_message_bytes": 1 << 15}
"""One buffer for each direction: sessions in opposite directions wait for it all the time."""


@pytest.fixture(scope="module")
def model(tiny_checkpoint) -> Path:
    return tiny_checkpoint("granite")


async def test_two_nodes_hand_over_to_each_other_at_once_with_one_buffer_each_way(model, tmp_path) -> None:
    always = {"local_prefill": ALWAYS_REMOTE, "fetch_from_decode": FetchConfig(min_tokens=1, max_time_ratio=1e9)}
    with Cluster(model, tmp_path, num_prefill=0, num_decode=0, num_both=2, both=NARROW | always) as cluster:
        prompts = [clear_prompt(model, 200 + seed, ANSWER_TOKENS, seed) for seed in range(16)]
        answers = await ask_all(cluster.url, prompts, at_once=len(prompts), num_tokens=ANSWER_TOKENS)
        assert [each.tokens for each in answers] == [greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts]
        pairs = {(each.report["prefill"]["node"], each.report["decode"]["node"]) for each in answers}
        assert pairs == {("n0", "n1"), ("n1", "n0")}
        nodes = cluster.idle_nodes(["n0", "n1"])
        assert all(node["counters"]["staging_waits"] for node in nodes.values())
        assert {node["role"] for node in nodes.values()} == {"both"}


async def test_one_node_alone_computes_and_answers(model, tmp_path) -> None:
    with Cluster(model, tmp_path, num_prefill=0, num_decode=0, num_both=1) as cluster:
        prompts = [clear_prompt(model, length, ANSWER_TOKENS) for length in (1, 17, 200)]
        answers = await ask_all(cluster.url, prompts, at_once=3, num_tokens=ANSWER_TOKENS)
        assert [each.tokens for each in answers] == [greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts]
        assert {each.report["path"] for each in answers} == {"local"}
