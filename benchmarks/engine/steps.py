"""Decode steps through the whole engine: what plans, claims, hashes and events add to the runner's own time.

    python3 -m benchmarks gpu-steps [--shape granite-h-micro] [--batch 1 --batch 64] [--context 256] [--no-overlap]

Random weights and prompts, greedy. Each request has been prefilled and decodes; a step's time is wall clock over
many steps, and ends when the tokens of the step before are on the host. `gpu-engine` has the forward passes alone.
"""

import time
from typing import Annotated

import torch
import typer

from benchmarks.engine.gpu import shrunk
from benchmarks.shapes import SHAPES
from headrace.cache.hits import HitPolicy, PrefixHit, ResumeLocally
from headrace.engine.build import BuiltEngine, engine_around
from headrace.engine.config import EngineConfig
from headrace.engine.sequence import Event, Job, Sampled
from headrace.models.weights import random_model
from headrace.request import Request, Sampling

TIMED_STEPS = 128


class Batch:
    """Requests that decode together, and their tokens so far."""

    def __init__(self, built: BuiltEngine, size: int, context: int):
        self.built = built
        self.num_tokens = 0
        generator = torch.Generator().manual_seed(size)
        prompts = torch.randint(3, 1000, (size, context), generator=generator).tolist()
        sampling = Sampling(max_tokens=4 * TIMED_STEPS, seed=0, temperature=0.0, ignore_eos=True)
        self.sequences = []
        for i, prompt in enumerate(prompts):
            request = Request(f"r{i}", tuple(prompt), len(prompt), sampling)
            job = Job(request, _resume_locally, sampling.max_tokens, time.monotonic() + 600, self._on_event)
            self.sequences.append(built.engine.sequence(job))
            built.engine.submit(self.sequences[-1])

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.built.engine.admit()
            self.built.engine.step()

    def prefill(self) -> None:
        """Runs until every request has had its first token."""
        while self.num_tokens < len(self.sequences) or any(s.is_prefilling for s in self.sequences):
            self.run(1)

    def release(self) -> None:
        for sequence in self.sequences:
            self.built.engine.release(sequence)

    def _on_event(self, event: Event) -> None:
        self.num_tokens += isinstance(event, Sampled)


def _resume_locally(hit: PrefixHit) -> HitPolicy:
    return ResumeLocally()


def step_ms(built: BuiltEngine, size: int, context: int) -> tuple[float, float]:
    """Milliseconds a step, and tokens a second."""
    batch = Batch(built, size, context)
    batch.prefill()
    batch.run(16)
    before, started_s = batch.num_tokens, time.perf_counter()
    batch.run(TIMED_STEPS)
    seconds = time.perf_counter() - started_s
    num_tokens = batch.num_tokens - before
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
    print(f"{shape}: ready after {time.perf_counter() - started_s:.1f} s", flush=True)
    print("\n| batch | ms a step | tokens/s |\n|---|---|---|")
    for size in batch:
        ms, rate = step_ms(built, size, context)
        print(f"| {size} | {ms:.2f} | {rate:,.0f} |", flush=True)
