"""Nodes that draft give the answers and the hits of nodes that do not, over HTTP."""

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.speculation.config import MTP, SpeculationConfig
from node_runtime.config import FetchConfig
from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import SMALL, Cluster, wait_until
from tests.support.engine.driving import GREEDY, generate, request, small_engine
from tests.support.engine.mtp_checkpoints import add_mtp, train_mtp
from tests.support.engine.oracle import random_prompt

pytestmark = pytest.mark.slow

TURNS, ANSWER_TOKENS = 5, 40
REPEATING = {"logit_bias": {"7": 30, "9": 30, "11": 30}}


async def chat(cluster: Cluster) -> tuple[list[tuple[Sequence[int], int, int]], Counter[str]]:
    """Answers of three tokens, again and again; of each turn also how many tokens of its prompt the prefill and the
    decode node had. And all drafts.
    """
    prompt, turns, drafts = random_prompt(60), [], Counter[str]()
    for turn in range(TURNS):
        (answer,) = await ask_all(cluster.url, [prompt], at_once=1, num_tokens=ANSWER_TOKENS, **REPEATING)
        hits = answer.report["prefill"]["state_hit_tokens"], answer.report["decode"]["attention_hit_tokens"]
        turns.append((answer.tokens, *hits))
        drafts.update({name: answer.report["decode"][name] for name in ("drafted_tokens", "accepted_tokens")})
        prompt = [*prompt, *answer.tokens, *random_prompt(9, turn)]
    return turns, drafts


def counted(cluster: Cluster, names: Iterable[str]) -> dict[str, float]:
    """These counters of all decode nodes."""
    nodes = [node for name, node in cluster.nodes().items() if name.startswith("d")]
    return {name: sum(node["counters"][name] for node in nodes) for name in names}


def with_trained_mtp(checkpoint: Path, family: str, folder: Path) -> Path:
    """A copy with an MTP layer that knows the chat's first answer."""
    path = Path(shutil.copytree(checkpoint, folder / family))
    layer, prompt = add_mtp(path), random_prompt(60)
    bias = {int(token): value for token, value in REPEATING["logit_bias"].items()}
    sampling = replace(GREEDY, max_tokens=ANSWER_TOKENS, bias_ids=tuple(bias), bias_values=tuple(bias.values()))
    answer = generate(small_engine(path), request(prompt, sampling)).tokens
    train_mtp(path, layer, [[*prompt, *answer]], num_steps=30)
    return path


@pytest.mark.parametrize(
    ("family", "drafter", "count", "each"),
    [
        ("granite", "ngram", "fixed", 1),
        ("granite_moe", "ngram", "fixed", 1),
        ("qwen35", "suffix", "auto", 1),
        ("qwen35", "suffix", "fixed", 2),
        ("qwen35_moe", "mtp", "fixed", 2),
        ("nemotron_h_moe", "mtp", "fixed", 1),
    ],
)
async def test_a_chat_of_five_turns_is_the_same_with_drafts(
    family: str, drafter: str, count: str, each: int, tiny_checkpoint, tmp_path: Path
) -> None:
    """`each`: nodes of each role."""
    checkpoint = tiny_checkpoint(family)
    if drafter == MTP:
        checkpoint = with_trained_mtp(checkpoint, family, tmp_path)
    chats, settings = [], (SpeculationConfig(), SpeculationConfig(drafter, count, 4))
    for number, speculation in enumerate(settings):
        folder = tmp_path / str(number)
        folder.mkdir()
        # What is fetched depends on measured times.
        fetch = {"fetch_from_others": FetchConfig(enabled=False)}
        engine = replace(SMALL, speculation=speculation)
        with Cluster(checkpoint, folder, each, each, engine=engine, prefill=fetch) as cluster:
            turns, drafts = await chat(cluster)
            cluster.idle_nodes([f"{role}{index}" for role in "pd" for index in range(each)])
            wait_until(lambda: counted(cluster, drafts) == drafts, "heartbeats with all drafts")  # noqa: B023
        chats.append(turns)
        print(f"\n{drafter if speculation.is_on else 'no drafts'}: hits {[hits for _, *hits in turns]}, {dict(drafts)}")
        drafted, accepted = drafts["drafted_tokens"], drafts["accepted_tokens"]
        assert (0 < accepted <= drafted) if speculation.is_on else accepted == drafted == 0
    assert chats[0] == chats[1]
