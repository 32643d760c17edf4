"""The whole cluster against the engine alone on CPU: HTTP, router, a prefill and a decode node, float32.

    python -m benchmarks.cpu_cluster [--threads 2] [--rounds 5] [--family granite ...]

The same models and work as `benchmarks.cpu_engine`. The engine runs in this process with scheduler, cache and sampler;
the cluster's answers are streamed over HTTP. Rounds alternate; the ratio is the median over rounds of cluster
rate / engine rate. Prefill is judged by the time to the first token.
"""

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.cpu_engine import DECODE_BATCHES, DECODE_CONTEXT, FAMILIES, bench_config
from benchmarks.streaming import body_of, stream
from headrace.cache.hits import ResumeLocally
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.sequence import Event, Job, Sampled
from headrace.engine.sequence import Sequence as EngineSequence
from headrace.request import Request, Sampling
from tests.support.cluster.cluster import Cluster
from tests.support.engine.tiny_checkpoints import build_model

PREFILL_TOKENS = 2048
DECODE_TOKENS = 128
TIMEOUT_S = 600.0
TOKENIZER = Path(__file__).parents[1] / "tiny_models" / "headrace-tiny-qwen3.5"


@dataclass(frozen=True)
class Timing:
    """Of several requests at once. decode_rate: tokens a second while all of them decode, from the moment each
    has its second token (the first one comes from the prefill node) until the first of them ends."""

    first_token_s: float
    decode_rate: float

    @classmethod
    def of(cls, started: float, arrivals: Sequence[Sequence[float]]) -> "Timing":
        first, last = max(times[1] for times in arrivals), min(times[-1] for times in arrivals)
        num_tokens = sum(first < at <= last for times in arrivals for at in times)
        return cls(min(times[0] for times in arrivals) - started, num_tokens / max(last - first, 1e-9))


@dataclass(frozen=True)
class Row:
    name: str
    num_prompts: int
    prompt_tokens: int
    answer_tokens: int
    rate: Callable[[Timing], float]  # tokens a second


ROWS = [
    Row(f"prefill {PREFILL_TOKENS}", 1, PREFILL_TOKENS, 2, lambda timing: PREFILL_TOKENS / timing.first_token_s),
    *(
        Row(f"decode batch {batch}", batch, DECODE_CONTEXT, DECODE_TOKENS, lambda timing: timing.decode_rate)
        for batch in DECODE_BATCHES
    ),
]


def fresh_prompts(row: Row, seed: int) -> list[list[int]]:
    """Other prompts in each round: no prefix is ever cached."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, 4096, (row.num_prompts, row.prompt_tokens), generator=generator).tolist()


def time_engine(built: BuiltEngine, row: Row, seed: int) -> Timing:
    arrivals: list[list[float]] = []
    sequences: list[EngineSequence] = []
    started = time.perf_counter()
    for prompt in fresh_prompts(row, seed):
        times: list[float] = []
        arrivals.append(times)
        sampling = Sampling(max_tokens=row.answer_tokens, seed=0, temperature=0.0, ignore_eos=True)
        job = Job(
            Request("r", tuple(prompt), len(prompt), sampling),
            lambda hit: ResumeLocally(),
            row.answer_tokens,
            time.monotonic() + TIMEOUT_S,
            partial(_note_time, times),
        )
        sequences.append(built.engine.sequence(job))
        built.engine.submit(sequences[-1])
    built.engine.admit()
    while built.engine.step():
        pass
    for sequence in sequences:
        built.engine.release(sequence)
    return Timing.of(started, arrivals)


def _note_time(times: list[float], event: Event) -> None:
    if isinstance(event, Sampled):
        times.append(time.perf_counter())


def time_cluster(url: str, row: Row, seed: int) -> Timing:
    return asyncio.run(_time_cluster(url, row, seed))


async def _time_cluster(url: str, row: Row, seed: int) -> Timing:
    started = time.perf_counter()
    prompts = fresh_prompts(row, seed)
    answers = (stream(url, body_of(prompt, row.answer_tokens), row.answer_tokens, TIMEOUT_S) for prompt in prompts)
    return Timing.of(started, [answer.arrivals for answer in await asyncio.gather(*answers)])


def bench_family(family: str, threads: int, rounds: int) -> None:
    print(f"\n{family}: cluster (router + 1 prefill + 1 decode node) against the engine alone, {threads} threads each")
    print(f"{'work':<16}{'cluster tok/s':>14}{'engine tok/s':>14}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        build_model(bench_config(family)).save_pretrained(path)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, path)
        config = EngineConfig(cache_bytes=512 << 20, max_step_tokens=2048, threads=threads)
        built = build_engine(str(path), config, time.monotonic)
        with Cluster(path, Path(folder), engine=config) as cluster:
            for row in ROWS:
                pairs = [
                    (row.rate(time_cluster(cluster.url, row, seed)), row.rate(time_engine(built, row, seed)))
                    for seed in range(rounds + 1)
                ][1:]  # the first round warms both up
                ratio = statistics.median(ours / engine for ours, engine in pairs)
                best = max(ours for ours, _ in pairs), max(engine for _, engine in pairs)
                print(f"{row.name:<16}{best[0]:>14.0f}{best[1]:>14.0f}{ratio:>8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of each node, and of the engine alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=FAMILIES)
    arguments = parser.parse_args()
    for family in arguments.family:
        bench_family(family, arguments.threads, arguments.rounds)


if __name__ == "__main__":
    main()
