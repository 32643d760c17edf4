"""The whole engine, driven from one thread: decode steps on a GPU, and a prefill with many checkpoints against one.

    python3 -m benchmarks gpu-steps [--shape granite-h-micro] [--batch 1 --batch 64] [--context 256] [--no-overlap]
    python -m benchmarks emission [--tokens 8192] [--checkpoints 32] [--rounds 7] [--cache-mib 128]

`gpu-steps` shows what plans, claims, hashes and events add to the runner's own time, which `gpu-engine` has. Random
weights and prompts, greedy; a step's time is wall clock over many steps, and ends when the tokens of the step before
are on the host.

`emission`: the shipped models in their default chunks on a CPU, policy `branch` without its grid: hints of the request
put the checkpoints at even distances, the last one stands at the prompt's last boundary in both cases. One request may
fill half of the slots, so many checkpoints need a large cache. Times are processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer

from benchmarks.shapes import SHAPES, TINY_MODELS, random_prompts, shrunk
from benchmarks.timing import compare, table_header, table_row
from headrace.cache.hits import HitPolicy, ResumeLocally
from headrace.engine.build import BuiltEngine, build_engine, engine_around
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.sequence import Event, Job, Sampled
from headrace.engine.sequence import Sequence as EngineSequence
from headrace.models.weights import random_model
from headrace.request import Request, Sampling
from headrace.token_array import TokenArray

TIMED_STEPS = 128


def greedy(prompt: Sequence[int], max_tokens: int, **fields: Any) -> Request:
    """A request that ignores the end of sequence."""
    sampling = Sampling(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    return Request("r", TokenArray.of(prompt), len(prompt), sampling, **fields)


def job_of(request: Request, max_new: int, hit_policy: HitPolicy, on_event: Callable[[Event], None]) -> Job:
    return Job(request, lambda hit: hit_policy, max_new, time.monotonic() + 3600, on_event)


def sequence_of(engine: Engine, job: Job) -> EngineSequence:
    """The job's sequence, ready for `Engine.submit`."""
    sequence = engine.intake.sequence(job)
    for _ in engine.intake.hash_prompt(sequence):
        pass
    engine.intake.compile_grammar(sequence)
    return sequence


class Batch:
    """Requests that run together in an engine; `arrivals` has the times (perf_counter) of each one's tokens."""

    def __init__(self, engine: Engine, requests: Sequence[Request], max_new: int) -> None:
        self._engine = engine
        self.arrivals: list[list[float]] = [[] for _ in requests]
        self.sequences = [
            sequence_of(engine, job_of(request, max_new, ResumeLocally(), partial(_note_time, times)))
            for request, times in zip(requests, self.arrivals, strict=True)
        ]
        for sequence in self.sequences:
            engine.submit(sequence)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.arrivals))

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self._engine.admit()
            self._engine.step()

    def finish(self) -> None:
        """Runs until every request has all of its tokens."""
        self._engine.admit()
        while self._engine.step():
            pass

    def release(self) -> None:
        for sequence in self.sequences:
            self._engine.release(sequence)


def _note_time(times: list[float], event: Event) -> None:
    if isinstance(event, Sampled):
        times.append(time.perf_counter())


def decode_rate(built: BuiltEngine, size: int, context: int) -> tuple[float, float]:
    """Milliseconds a step, and tokens a second."""
    prompts = random_prompts(size, context, seed=size, vocabulary=1000)
    max_tokens = 4 * TIMED_STEPS
    batch = Batch(built.engine, [greedy(prompt, max_tokens) for prompt in prompts], max_tokens)
    while not all(batch.arrivals) or any(sequence.is_prefilling for sequence in batch.sequences):
        batch.step()
    batch.step(16)
    before, started_s = batch.num_tokens, time.perf_counter()
    batch.step(TIMED_STEPS)
    seconds, num_tokens = time.perf_counter() - started_s, batch.num_tokens - before
    batch.release()
    return 1e3 * seconds / TIMED_STEPS, num_tokens / seconds


def main(
    shape: str = "granite-h-micro",
    batch: list[int] = [1, 16, 64, 256],  # noqa: B006
    context: int = 256,
    device: str = "cuda",
    cache_gib: float = 40.0,
    overlap: bool = True,
    shrink: Annotated[bool, typer.Option("--shrink", help="a tiny shape: a trial of this file")] = False,
) -> None:
    """Decode steps through the whole engine on a GPU."""
    config = EngineConfig(
        device=device,
        state_dtype="float32" if device == "cpu" else "bfloat16",
        overlap=overlap,
        cache_bytes=int(cache_gib * 2**30),
        state_share=0.7,
        max_step_tokens=8192,
        max_running=max(batch),
        max_model_tokens=context + 4 * TIMED_STEPS,
    )
    started_s = time.perf_counter()
    shape_config = shrunk(SHAPES[shape]) if shrink else SHAPES[shape]
    model = random_model(shape_config, getattr(torch, config.model_dtype), config.device)
    built = engine_around(model, config, time.monotonic)
    print(f"{shape}: ready after {time.perf_counter() - started_s:.1f} s\n", flush=True)
    print(table_header("batch", "ms a step", "tokens/s"))
    for size in batch:
        ms, rate = decode_rate(built, size, context)
        print(table_row(size, f"{ms:.2f}", f"{rate:,.0f}"), flush=True)


def emission(tokens: int = 8192, checkpoints: int = 32, rounds: int = 7, cache_mib: int = 128) -> None:
    """A prefill with many checkpoints against one."""
    print(f"prefill of {tokens} tokens, seconds of processor time\n")
    print(table_header("model", f"{checkpoints} checkpoints", "one", "ratio"))
    for path in sorted(TINY_MODELS.glob("headrace-tiny-*")):
        config = EngineConfig(
            cache_bytes=cache_mib << 20,
            state_share=0.5,
            checkpoint_grid_tokens=tokens,  # no grid: the hints alone decide how many there are
            threads=1,
        )
        engine = build_engine(str(path), config, time.monotonic).engine
        one, many = partial(prefill_s, engine, tokens, 1), partial(prefill_s, engine, tokens, checkpoints)
        found = compare(one, many, rounds)
        print(table_row(path.name, f"{found.second_s:.3f}", f"{found.first_s:.3f}", f"{found.ratio:.3f}"), flush=True)


def prefill_s(engine: Engine, num_tokens: int, num_checkpoints: int, number: int) -> float:
    """Processor seconds of one prefill that finds nothing in the cache and publishes `num_checkpoints`."""
    (prompt,) = random_prompts(1, num_tokens)
    hints = tuple(num_tokens * i // num_checkpoints for i in range(1, num_checkpoints))
    salt = b"%d of %d" % (number, num_checkpoints)  # of its own: nothing of the prompt is cached
    batch = Batch(engine, [greedy(prompt, 2, salt=salt, boundaries=hints)], max_new=1)
    started_s = time.process_time()
    batch.finish()
    seconds = time.process_time() - started_s
    batch.release()
    (sequence,) = batch.sequences
    if len(sequence.all_checkpoints) != num_checkpoints:
        raise RuntimeError(f"{len(sequence.all_checkpoints)} checkpoints were published, not {num_checkpoints}")
    return seconds
