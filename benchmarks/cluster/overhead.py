"""The whole cluster against the engine alone on CPU: HTTP, router, a prefill and a decode node, float32.

    python -m benchmarks cpu-cluster [--threads 1] [--rounds 5]

The same models and work as `cpu-engine`. The engine runs in this process with scheduler, cache and sampler; the
cluster's answers are streamed over HTTP. Rounds alternate; the ratio is the median over rounds of cluster rate / engine
rate. Prefill is judged by the time to the first token.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster.client import body_of, stream
from benchmarks.cluster.processes import Processes
from benchmarks.shapes import CPU_SHAPES, write_shape, write_weights
from headrace.cache.hits import ResumeLocally
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.sequence import Event, Job, Sampled
from headrace.engine.sequence import Sequence as EngineSequence
from headrace.request import Request, Sampling

TIMEOUT_S = 600.0
CACHE_BYTES, STEP_TOKENS = 512 << 20, 2048


@dataclass(frozen=True)
class Timing:
    """Times of requests that run together.

    decode_rate   tokens a second while all of them decode: from the moment each has its second token (the first comes
                  from the prefill node) until the first of them ends
    """

    first_token_s: float
    decode_rate: float

    @classmethod
    def of(cls, began_s: float, arrivals: Sequence[Sequence[float]]) -> "Timing":
        first, last = max(times[1] for times in arrivals), min(times[-1] for times in arrivals)
        num_tokens = sum(first < at <= last for times in arrivals for at in times)
        return cls(min(times[0] for times in arrivals) - began_s, num_tokens / max(last - first, 1e-9))


@dataclass(frozen=True)
class Work:
    name: str
    num_prompts: int
    prompt_tokens: int
    answer_tokens: int
    rate: Callable[[Timing], float]  # tokens a second

    def prompts(self, seed: int) -> list[list[int]]:
        """Other prompts in each round, so that no prefix is cached."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(300, 4096, (self.num_prompts, self.prompt_tokens), generator=generator).tolist()


WORKS = (
    Work("prefill 2048", 1, 2048, 2, lambda timing: 2048 / timing.first_token_s),
    Work("decode batch 1", 1, 128, 128, lambda timing: timing.decode_rate),
    Work("decode batch 8", 8, 128, 128, lambda timing: timing.decode_rate),
)


def time_engine(built: BuiltEngine, work: Work, seed: int) -> Timing:
    arrivals: list[list[float]] = []
    sequences: list[EngineSequence] = []
    began_s = time.perf_counter()
    sampling = Sampling(max_tokens=work.answer_tokens, seed=0, temperature=0.0, ignore_eos=True)
    for prompt in work.prompts(seed):
        request, times = Request("r", tuple(prompt), len(prompt), sampling), list[float]()
        arrivals.append(times)
        deadline_s = time.monotonic() + TIMEOUT_S
        job = Job(request, lambda hit: ResumeLocally(), work.answer_tokens, deadline_s, partial(_note_time, times))
        sequences.append(built.engine.sequence(job))
        built.engine.submit(sequences[-1])
    built.engine.admit()
    while built.engine.step():
        pass
    for sequence in sequences:
        built.engine.release(sequence)
    return Timing.of(began_s, arrivals)


def _note_time(times: list[float], event: Event) -> None:
    if isinstance(event, Sampled):
        times.append(time.perf_counter())


async def time_cluster(url: str, work: Work, seed: int) -> Timing:
    began_s = time.perf_counter()
    bodies = [body_of(prompt, work.answer_tokens) for prompt in work.prompts(seed)]
    answers = await asyncio.gather(*(stream(url, body, work.answer_tokens, TIMEOUT_S) for body in bodies))
    return Timing.of(began_s, [answer.arrivals for answer in answers])


def main(threads: int = 1, rounds: int = 5) -> None:
    """The whole cluster against the engine alone, on CPU; `threads` are those of each node and of the engine."""
    engine: dict[str, Any] = {"cache_bytes": CACHE_BYTES, "max_step_tokens": STEP_TOKENS, "threads": threads}
    nodes = {
        "p0": ("prefill", {"engine": engine}),
        "d0": ("decode", {"engine": engine} | {"local_prefill": {"max_tokens": 0}}),
    }
    for family, shape in CPU_SHAPES.items():
        print(
            f"\n{family}: cluster (router + 1 prefill + 1 decode node) against the engine alone, {threads} threads each"
        )
        print(f"{'work':<16}{'cluster tok/s':>14}{'engine tok/s':>14}{'ratio':>8}")
        with tempfile.TemporaryDirectory() as folder:
            model = write_shape(shape, Path(folder) / family)
            write_weights(model, "cpu", torch.float32)
            built = build_engine(str(model), EngineConfig(**engine), time.monotonic)
            with Processes(Path(folder) / "run", model, nodes) as cluster:
                cluster.wait_ready(time.perf_counter() + 60)
                for work in WORKS:
                    pairs = [
                        (
                            work.rate(asyncio.run(time_cluster(cluster.url, work, seed))),
                            work.rate(time_engine(built, work, seed)),
                        )
                        for seed in range(rounds + 1)
                    ][1:]  # the first round warms both up
                    ratio = statistics.median(ours / alone for ours, alone in pairs)
                    best = max(ours for ours, _ in pairs), max(alone for _, alone in pairs)
                    print(f"{work.name:<16}{best[0]:>14.0f}{best[1]:>14.0f}{ratio:>8.2f}", flush=True)
