"""What it saves that prefill nodes learn from decode nodes: a chat with long answers, learning on and off.

    python -m benchmarks fetching [--model DIR] [--rounds 7] [--turns 5] [--answer 300] [--new 24]

Two clusters, router + 1 prefill node + 1 decode node each, that differ in `fetch_from_decode.enabled` alone; the
decode node never prefills itself. Rounds alternate, each with a chat of its own; the settings are the defaults, so
that a node fetches when it estimates that to take less time. Token counts are exact; times are medians over rounds.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.streaming import body_of, stream
from headrace.engine.config import EngineConfig
from prefill_node.config import FetchConfig
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.nodes import until_the_router_knows

DEFAULT_MODEL = Path(__file__).parents[1] / "tiny_models" / "headrace-tiny-qwen3.5"
FIRST_TOKENS = 100
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Turn:
    prompt_tokens: int
    computed_tokens: int
    fetched_tokens: int
    first_token_s: float


async def chat(cluster: Cluster, arguments: argparse.Namespace, seed: int) -> list[Turn]:
    """The turns of one chat; a user reads before answering, so the router knows by then what was generated."""
    dice = random.Random(seed)
    prompt = _tokens(dice, FIRST_TOKENS)
    turns = []
    for _ in range(arguments.turns):
        answer, turn = await _ask(cluster.url, prompt, arguments.answer)
        turns.append(turn)
        prompt = [*prompt, *answer, *_tokens(dice, arguments.new)]
        await until_the_router_knows(cluster)
    return turns


async def _ask(url: str, prompt: list[int], num_tokens: int) -> tuple[list[int], Turn]:
    answer = await stream(url, body_of(prompt, num_tokens), num_tokens, TIMEOUT_S)
    prefill = answer.usage["headrace"]["prefill"]
    turn = Turn(len(prompt), prefill["computed_tokens"], prefill["fetched_tokens"], answer.first_token_s)
    return list(answer.tokens), turn


def _tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(300, 4096) for _ in range(count)]


def report(on: list[list[Turn]], off: list[list[Turn]]) -> None:
    print(
        f"{'turn':<6}{'prompt':>8}{'computed on':>13}{'off':>7}{'fetched':>9}{'TTFT on ms':>13}{'off':>8}{'off/on':>8}"
    )
    for number, (learned, alone) in enumerate(zip(zip(*on, strict=True), zip(*off, strict=True), strict=True)):
        first_on, first_off = ([1e3 * turn.first_token_s for turn in turns] for turns in (learned, alone))
        ratio = statistics.median(a / b for a, b in zip(first_off, first_on, strict=True))
        print(
            f"{number + 1:<6}{_range(t.prompt_tokens for t in learned):>8}"
            f"{_range(t.computed_tokens for t in learned):>13}{_range(t.computed_tokens for t in alone):>7}"
            f"{_range(t.fetched_tokens for t in learned):>9}{statistics.median(first_on):>13.1f}"
            f"{statistics.median(first_off):>8.1f}{ratio:>8.2f}"
        )
    computed = [sum(turn.computed_tokens for chat in chats for turn in chat) for chats in (on, off)]
    print(f"computed in all: {computed[0]} on, {computed[1]} off: {computed[1] / computed[0]:.2f} times")


def _range(values: Any) -> str:
    """One number when all rounds agree."""
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--answer", type=int, default=300, help="tokens of each answer")
    parser.add_argument("--new", type=int, default=24, help="tokens that the user adds each turn")
    arguments = parser.parse_args()
    engine = EngineConfig(cache_bytes=256 << 20, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        clusters = [
            Cluster(
                arguments.model,
                Path(folder),
                engine=engine,
                prefill={"fetch_from_decode": FetchConfig(learn)},
            )
            for learn in (True, False)
        ]
        with clusters[0] as on, clusters[1] as off:
            rounds = [
                [asyncio.run(chat(c, arguments, seed)) for c in (on, off)] for seed in range(arguments.rounds + 1)
            ]
        print(f"{arguments.model.name}, {arguments.rounds} chats; the first round, which warms up, is not counted")
        report([pair[0] for pair in rounds[1:]], [pair[1] for pair in rounds[1:]])


if __name__ == "__main__":
    main()
