"""Whole clusters on a CPU over HTTP, one router, one prefill and one decode node each, float32.

    python -m benchmarks cpu-cluster [--threads 1] [--rounds 5]
    python -m benchmarks fetching [--model DIR] [--rounds 7] [--turns 5] [--answer 300] [--new 24]

`cpu-cluster`: the cluster against the engine alone, with the models of `cpu-engine`. The engine runs in this process
with scheduler, cache and sampler; the cluster's answers are streamed. Rounds alternate; the ratio is the median over
rounds of cluster rate / engine rate. Prefill is judged by the time to the first token.

`fetching`: a chat with long answers in two clusters that differ in `fetch_from_others.enabled` alone; no decode node
prefills. Rounds alternate, each with a chat of its own; a node fetches when it estimates that to take less time, as by
default. Token counts are exact; times are medians over rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster.client import Client, body_of, stream
from benchmarks.cluster.processes import Processes, prefill_and_decode
from benchmarks.engine.steps import Batch, greedy
from benchmarks.shapes import CPU_SHAPES, TINY_MODELS, random_prompts, write_shape, write_weights
from benchmarks.timing import compare, table_header, table_row
from headrace.engine.build import build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine

TIMEOUT_S = 600.0
START_TIMEOUT_S = 60.0
CACHE_BYTES, STEP_TOKENS = 512 << 20, 2048
FIRST_TOKENS = 100  # of a chat


@dataclass(frozen=True)
class Timing:
    """Times of requests that run together.

    seconds_a_token   while all of them decode: from the moment each has its second token (the first comes from the
                      prefill node) until the first of them ends
    """

    first_token_s: float
    seconds_a_token: float

    @classmethod
    def of(cls, began_s: float, arrivals: Sequence[Sequence[float]]) -> Timing:
        first, last = max(times[1] for times in arrivals), min(times[-1] for times in arrivals)
        num_tokens = sum(first < at <= last for times in arrivals for at in times)
        return cls(min(times[0] for times in arrivals) - began_s, max(last - first, 1e-9) / max(num_tokens, 1))


@dataclass(frozen=True)
class Work:
    """Prompts that are sent at once; other ones in each round, so that no prefix is cached."""

    name: str
    num_prompts: int
    prompt_tokens: int
    answer_tokens: int
    seconds_a_token: Callable[[Timing], float]

    def on_engine(self, engine: Engine, number: int) -> float:
        began_s = time.perf_counter()
        requests = [greedy(prompt, self.answer_tokens) for prompt in self._prompts(number)]
        batch = Batch(engine, requests, self.answer_tokens)
        batch.finish()
        batch.release()
        return self.seconds_a_token(Timing.of(began_s, batch.arrivals))

    def on_cluster(self, url: str, number: int) -> float:
        return asyncio.run(self._stream(url, number))

    async def _stream(self, url: str, number: int) -> float:
        began_s = time.perf_counter()
        bodies = [body_of(prompt, self.answer_tokens) for prompt in self._prompts(number)]
        answers = await asyncio.gather(*(stream(url, body, self.answer_tokens, TIMEOUT_S) for body in bodies))
        return self.seconds_a_token(Timing.of(began_s, [answer.arrivals for answer in answers]))

    def _prompts(self, number: int) -> list[list[int]]:
        return random_prompts(self.num_prompts, self.prompt_tokens, seed=number)


WORKS = (
    Work("prefill 2,048", 1, 2048, 2, lambda timing: timing.first_token_s / 2048),
    Work("decode, batch 1", 1, 128, 128, lambda timing: timing.seconds_a_token),
    Work("decode, batch 8", 8, 128, 128, lambda timing: timing.seconds_a_token),
)


def main(threads: int = 1, rounds: int = 5) -> None:
    """The whole cluster against the engine alone, on CPU; `threads` are those of each node and of the engine."""
    engine: dict[str, Any] = {"cache_bytes": CACHE_BYTES, "max_step_tokens": STEP_TOKENS, "threads": threads}
    for family, shape in CPU_SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = write_shape(shape, Path(folder) / family)
            write_weights(model, "cpu", torch.float32)
            alone = build_engine(str(model), EngineConfig(**engine), time.monotonic).engine
            with Processes(Path(folder) / "run", model, prefill_and_decode(engine)) as cluster:
                cluster.wait_ready(time.perf_counter() + START_TIMEOUT_S)
                print(f"\n{family}, {threads} threads each\n")
                print(table_header("work", "cluster tok/s", "engine tok/s", "ratio"))
                for work in WORKS:
                    found = compare(partial(work.on_cluster, cluster.url), partial(work.on_engine, alone), rounds)
                    rates = f"{1 / found.first_s:,.0f}", f"{1 / found.second_s:,.0f}"
                    print(table_row(work.name, *rates, f"{found.ratio:.2f}"), flush=True)


@dataclass(frozen=True)
class Turn:
    prompt_tokens: int
    computed_tokens: int
    fetched_tokens: int
    first_token_s: float


def chat(url: str, turns: int, answer: int, new: int, seed: int) -> list[Turn]:
    client = Client(url, time.perf_counter() + TIMEOUT_S)
    answered = asyncio.run(client.chat(FIRST_TOKENS, new, answer, turns, seed))
    reports = [(length, each, each.usage["headrace"]["prefill"]) for length, each in answered]
    return [Turn(length, p["computed_tokens"], p["fetched_tokens"], each.first_token_s) for length, each, p in reports]


def print_turns(on: list[list[Turn]], off: list[list[Turn]]) -> None:
    """A row a turn, of the chats with fetching on and off."""
    print(table_header("turn", "prompt", "computed: on / off", "fetched", "TTFT on / off, ms", "off/on"))
    for number, (fetching, alone) in enumerate(zip(zip(*on, strict=True), zip(*off, strict=True), strict=True)):
        first_on, first_off = ([1e3 * turn.first_token_s for turn in turns] for turns in (fetching, alone))
        computed = [_range(turn.computed_tokens for turn in turns) for turns in (fetching, alone)]
        times = f"{statistics.median(first_on):.1f} / {statistics.median(first_off):.1f}"
        ratio = statistics.median(a / b for a, b in zip(first_off, first_on, strict=True))
        prompt, fetched = _range(t.prompt_tokens for t in fetching), _range(t.fetched_tokens for t in fetching)
        print(table_row(number + 1, prompt, " / ".join(computed), fetched, times, f"{ratio:.2f}"))
    total_on, total_off = (sum(turn.computed_tokens for chat in chats for turn in chat) for chats in (on, off))
    print(f"\ncomputed in all: {total_on} on, {total_off} off: {total_off / total_on:.2f} times")


def _range(values: Iterable[int]) -> str:
    """One number when all rounds agree."""
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def fetching(
    model: Path = TINY_MODELS / "headrace-tiny-qwen3.5",
    rounds: int = 7,
    turns: int = 5,
    answer: int = 300,
    new: int = 24,
) -> None:
    """A chat with fetching on and off; `answer` and `new` are tokens a turn, of the model and of the user."""
    engine, router = {"cache_bytes": 256 << 20, "threads": 1}, {"heartbeat_s": 1.0, "roles": "fixed"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        clusters = []
        for is_enabled in (True, False):
            nodes = prefill_and_decode(engine, prefill={"fetch_from_others": {"enabled": is_enabled}})
            path = Path(folder) / f"fetching-{is_enabled}"
            clusters.append(stack.enter_context(Processes(path, model, nodes, router=router)))
        for cluster in clusters:
            cluster.wait_ready(time.perf_counter() + START_TIMEOUT_S)
        pairs = [[chat(each.url, turns, answer, new, seed) for each in clusters] for seed in range(rounds + 1)]
    print(f"{model.name}, {rounds} chats; one before them, which warms up, is not counted\n")
    print_turns([on for on, _ in pairs[1:]], [off for _, off in pairs[1:]])
