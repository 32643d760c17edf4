"""Scenario 19 with real nodes: a decode node short of blocks preempts, and no client can tell."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.nodes import status_of
from tests.support.engine.driving import sized
from tests.support.engine.oracle import clear_prompt, greedy
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

NUM_BLOCKS = 20  # ten for each request in the end, three at its start
CHECK_TIMEOUT_S = PATIENCE_S


async def test_19_preempted_answers_are_whole_and_everything_comes_back(tiny_checkpoint, tmp_path: Path) -> None:
    model = tiny_checkpoint("granite")
    prompts = [clear_prompt(model, 30 + i, 120, seed=i) for i in range(8)]
    with Cluster(model, tmp_path, engine=sized(model, NUM_BLOCKS, 16)) as cluster:
        answers = await ask_all(cluster.url, prompts, at_once=8, num_tokens=120)
        assert [answer.tokens for answer in answers] == [greedy(model, prompt, 120) for prompt in prompts]
        assert {answer.report["path"] for answer in answers} == {"remote"}
        assert {answer.report["migrations"] for answer in answers} == {0}
        node = cluster.nodes()["d0"]
        status = await status_of(node["address"])
        assert status.counters["preemptions"] > 0
        deadline_s = time.monotonic() + CHECK_TIMEOUT_S
        while status.blocks.in_use or status.slots.in_use:
            assert time.monotonic() < deadline_s, f"still in use: {status}"
            await asyncio.sleep(0.05)
            status = await status_of(node["address"])
