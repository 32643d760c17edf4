"""Six chats at once on two prefill and two decode nodes: no turn computes again what its chat had computed before.

Generating is another matter: an answer may go to the decode node that has less to do, though the other holds its chat's
blocks. What it lacks there travels from the prefill node.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from node_runtime.config import FetchConfig
from tests.support.cluster.asking import ASK_TIMEOUT_S, Answered, ask
from tests.support.cluster.cluster import Cluster
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

MODELS = Path(__file__).parents[2] / "tiny_models"
FETCH = {"fetch_from_others": FetchConfig(min_tokens=1, max_time_ratio=1e9)}
NUM_CHATS, NUM_TURNS, FIRST_TOKENS, NEW_TOKENS, ANSWER_TOKENS = 6, 4, 400, 40, 24
BLOCK_TOKENS = 16
BY_CHANCE = 0.5
"""Share of answers that a router which knew no caches would have generated where their chat's blocks are."""


@dataclass(frozen=True)
class Turn:
    """A later turn: tokens that its chat had computed as whole blocks, those that no prefill node computed again, and
    those that its decode node held."""

    known: int
    prefill: int
    decode: int


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, 500) for _ in range(count)]


async def chat(client: httpx.AsyncClient, seed: int) -> list[Turn]:
    rng = random.Random(seed)
    prompt, turns = tokens(rng, FIRST_TOKENS), list[Turn]()
    for number in range(NUM_TURNS):
        answer = await ask(client, prompt, ANSWER_TOKENS)
        if number:
            turns.append(_turn(answer, len(prompt)))
        prompt = [*prompt, *answer.tokens, *tokens(rng, NEW_TOKENS)]
    return turns


def _turn(answer: Answered, num_tokens: int) -> Turn:
    prefill, decode = answer.report["prefill"], answer.report["decode"]
    known = (num_tokens - NEW_TOKENS - ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return Turn(known, num_tokens - prefill["computed_tokens"], decode["attention_hit_tokens"] or 0)


async def chats(model: Path, folder: Path, num_pairs: int) -> Sequence[Turn]:
    router = {"policy": "predicted", "roles": "fixed"}
    with Cluster(
        model, folder, num_prefill=num_pairs, num_decode=num_pairs, prefill=FETCH, decode=FETCH, router=router
    ) as cluster:
        async with (
            httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client,
            asyncio.timeout(PATIENCE_S),
        ):
            of_each = await asyncio.gather(*(chat(client, seed) for seed in range(NUM_CHATS)))
        cluster.idle_nodes([f"{role}{number}" for role in "dp" for number in range(num_pairs)])
    return [turn for turns in of_each for turn in turns]


@pytest.mark.parametrize("name", ["headrace-tiny-granite-h", "headrace-tiny-qwen3.5"])
async def test_chats_on_two_pairs_hit_like_on_one(name: str, tmp_path: Path) -> None:
    for num_pairs in (1, 2):
        turns = await chats(MODELS / name, _folder(tmp_path, num_pairs), num_pairs)
        prefills = sum(turn.prefill >= turn.known for turn in turns)
        decodes = sum(turn.decode >= turn.known for turn in turns)
        print(
            f"{name}, {num_pairs}P{num_pairs}D: of {len(turns)} later turns {prefills} compute nothing again, "
            f"{decodes} are generated where all that their chat has computed is cached"
        )
        assert prefills == len(turns) == NUM_CHATS * (NUM_TURNS - 1)
        assert decodes == len(turns) if num_pairs == 1 else decodes > BY_CHANCE * len(turns)


def _folder(tmp_path: Path, num_pairs: int) -> Path:
    folder = tmp_path / str(num_pairs)
    folder.mkdir()
    return folder
