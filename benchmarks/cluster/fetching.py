"""A chat with long answers whose prefill node fetches them from the decode node, and one whose prefill node computes.

    python -m benchmarks fetching [--model DIR] [--rounds 7] [--turns 5] [--answer 300] [--new 24]

Two clusters, router + 1 prefill node + 1 decode node each, that differ in `fetch_from_decode.enabled` alone; the
decode node never prefills itself. Rounds alternate, each with a chat of its own; the settings are the defaults, so
that a node fetches when it estimates that to take less time. Token counts are exact; times are medians over rounds.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.client import Client
from benchmarks.cluster.processes import NodeSettings, Processes
from benchmarks.shapes import TINY_MODELS

FIRST_TOKENS = 100
DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Turn:
    prompt_tokens: int
    computed_tokens: int
    fetched_tokens: int
    first_token_s: float


async def chat(url: str, turns: int, answer: int, new: int, seed: int) -> list[Turn]:
    answered = await Client(url, time.perf_counter() + DEADLINE_S).chat(FIRST_TOKENS, new, answer, turns, seed)
    reports = [(length, each, each.usage["headrace"]["prefill"]) for length, each in answered]
    return [Turn(length, p["computed_tokens"], p["fetched_tokens"], each.first_token_s) for length, each, p in reports]


def report(on: list[list[Turn]], off: list[list[Turn]]) -> None:
    print(
        f"{'turn':<6}{'prompt':>8}{'computed on':>13}{'off':>7}{'fetched':>9}{'TTFT on ms':>13}{'off':>8}{'off/on':>8}"
    )
    for number, (with_fetch, alone) in enumerate(zip(zip(*on, strict=True), zip(*off, strict=True), strict=True)):
        first_on, first_off = ([1e3 * turn.first_token_s for turn in turns] for turns in (with_fetch, alone))
        ratio = statistics.median(a / b for a, b in zip(first_off, first_on, strict=True))
        print(
            f"{number + 1:<6}{_range(t.prompt_tokens for t in with_fetch):>8}"
            f"{_range(t.computed_tokens for t in with_fetch):>13}{_range(t.computed_tokens for t in alone):>7}"
            f"{_range(t.fetched_tokens for t in with_fetch):>9}{statistics.median(first_on):>13.1f}"
            f"{statistics.median(first_off):>8.1f}{ratio:>8.2f}"
        )
    computed = [sum(turn.computed_tokens for chat in chats for turn in chat) for chats in (on, off)]
    print(f"computed in all: {computed[0]} on, {computed[1]} off: {computed[1] / computed[0]:.2f} times")


def _range(values: Iterable[int]) -> str:
    """One number when all rounds agree."""
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def main(
    model: Path = TINY_MODELS / "headrace-tiny-qwen3.5",
    rounds: int = 7,
    turns: int = 5,
    answer: int = 300,
    new: int = 24,
) -> None:
    """A chat with fetching on and off; `answer` and `new` are tokens a turn, of the model and of the user."""
    engine = {"engine": {"cache_bytes": 256 << 20, "threads": 1}}

    def nodes(is_enabled: bool) -> NodeSettings:
        prefill: dict[str, Any] = engine | {"fetch_from_decode": {"enabled": is_enabled}}
        return {"p0": ("prefill", prefill), "d0": ("decode", engine | {"local_prefill": {"max_tokens": 0}})}

    router = {"heartbeat_s": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        with (
            Processes(Path(folder) / "on", model, nodes(True), router=router) as on,
            Processes(Path(folder) / "off", model, nodes(False), router=router) as off,
        ):
            for cluster in (on, off):
                cluster.wait_ready(time.perf_counter() + 60)
            done = [
                [asyncio.run(chat(cluster.url, turns, answer, new, seed)) for cluster in (on, off)]
                for seed in range(rounds + 1)
            ]
        print(f"{model.name}, {rounds} chats; the first round, which warms up, is not counted")
        report([pair[0] for pair in done[1:]], [pair[1] for pair in done[1:]])
