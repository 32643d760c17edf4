"""Nodes that draft give the answers and the hits of nodes that do not, over HTTP."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.speculation.config import SpeculationConfig
from node_runtime.config import FetchConfig
from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import SMALL, Cluster
from tests.support.engine.oracle import random_prompt

pytestmark = pytest.mark.slow

TURNS, ANSWER_TOKENS = 5, 40
REPEATING = {"logit_bias": {"7": 30, "9": 30, "11": 30}}


async def chat(cluster: Cluster) -> list[tuple[Sequence[int], int]]:
    """Answers of three tokens, again and again; of each turn also how much of its prompt was found."""
    prompt, turns = random_prompt(60), []
    for turn in range(TURNS):
        (answer,) = await ask_all(cluster.url, [prompt], at_once=1, num_tokens=ANSWER_TOKENS, **REPEATING)
        turns.append((answer.tokens, answer.report["prefill"]["state_hit_tokens"]))
        prompt = [*prompt, *answer.tokens, *random_prompt(9, turn)]
    return turns


@pytest.mark.parametrize(("family", "drafter"), [("granite", "ngram"), ("qwen35", "suffix")])
async def test_a_chat_of_five_turns_is_the_same_with_drafts(
    family: str, drafter: str, tiny_checkpoint, tmp_path: Path
) -> None:
    chats, settings = [], (SpeculationConfig(), SpeculationConfig(drafter, "fixed", 4))
    for number, speculation in enumerate(settings):
        folder = tmp_path / str(number)
        folder.mkdir()
        # What is fetched depends on measured times.
        fetch = {"fetch_from_others": FetchConfig(enabled=False)}
        engine = replace(SMALL, speculation=speculation)
        with Cluster(tiny_checkpoint(family), folder, engine=engine, prefill=fetch) as cluster:
            chats.append(await chat(cluster))
            nodes = cluster.idle_nodes(["p0", "d0"])
        drafted, accepted = (nodes["d0"]["counters"][f"{name}_tokens"] for name in ("drafted", "accepted"))
        assert (0 < accepted <= drafted) if speculation.is_on else accepted == drafted == 0
    assert chats[0] == chats[1]
