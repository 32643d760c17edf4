"""A chat through the router whose answers the prefill node learns from the decode node, or computes again."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from node_runtime.config import FetchConfig
from tests.support.cluster.asking import Answered, ask_all
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.nodes import until_the_router_knows
from tests.support.engine.oracle import greedy_along, random_prompt
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

ANSWER_TOKENS, NEW_TOKENS, TURNS = 70, 19, 3
ON = FetchConfig(min_tokens=1, max_time_ratio=1e9)
OFF = replace(ON, enabled=False)


async def chats(cluster: Cluster, model: Path, seeds: Sequence[int]) -> list[list[Answered]]:
    """The turns of several chats side by side; each answer is checked. Turn by turn."""
    prompts = [random_prompt(100, seed) for seed in seeds]
    turns: list[list[Answered]] = []
    for turn in range(TURNS):
        answers = await ask_all(cluster.url, prompts, at_once=len(prompts), num_tokens=ANSWER_TOKENS)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer.tokens) == ANSWER_TOKENS
            assert answer.tokens == greedy_along(model, prompt, answer.tokens)
        turns.append(answers)
        prompts = [
            [*prompt, *answer.tokens, *random_prompt(NEW_TOKENS, seed=turn)]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        await until_the_router_knows(cluster)
    return turns


def nothing_is_held(cluster: Cluster) -> bool:
    return all(node[pool]["in_use"] == 0 for node in cluster.nodes().values() for pool in ("blocks", "slots"))


@pytest.mark.parametrize("family", ["granite", "qwen35"])
@pytest.mark.parametrize("learn", [ON, OFF], ids=["on", "off"])
async def test_a_turn_computes_what_nobody_knows(family, learn, tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint(family)
    with Cluster(model, tmp_path, prefill={"fetch_from_others": learn}) as cluster:
        turns = await chats(cluster, model, seeds=[31])
        length = 100
        for number, (answer,) in enumerate(turns):
            prefill = answer.report["prefill"]
            own = (length - ANSWER_TOKENS - NEW_TOKENS - 1) // 16 * 16 if number else 0  # the previous prompt's last
            generated = (length - NEW_TOKENS - 1) // 16 * 16 if number else 0  # the decode node's newest checkpoint
            known = generated if learn.enabled else own
            assert prefill["state_hit_tokens"] == own
            assert (prefill["fetched_tokens"], prefill["computed_tokens"]) == (known - own, length - known)
            assert answer.usage["prompt_tokens_details"]["cached_tokens"] == known
            length += ANSWER_TOKENS + NEW_TOKENS


@pytest.mark.parametrize("family", ["granite", "qwen35"])
async def test_chats_side_by_side_fetch_and_hand_over_at_once(family, tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint(family)
    small = {"staging_buffers": 2, "max_message_bytes": 1 << 15}  # both directions wait for buffers
    learn = {"fetch_from_others": ON}
    with Cluster(model, tmp_path, num_prefill=2, num_decode=2, prefill=small | learn, decode=small) as cluster:
        turns = await chats(cluster, model, seeds=range(40, 48))
        fetched = [answer.report["prefill"]["fetched_tokens"] for answers in turns[1:] for answer in answers]
        assert sum(tokens > 0 for tokens in fetched) == len(fetched)
        async with asyncio.timeout(PATIENCE_S):
            while not nothing_is_held(cluster):
                await asyncio.sleep(0.05)
