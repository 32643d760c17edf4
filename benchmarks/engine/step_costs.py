"""How well a node's own step costs predict its steps: a mixed load on one engine.

    python3 -m benchmarks step-costs [--shape granite-h-micro] [--seconds 20] [--token-gap-ms 10]
    python -m benchmarks step-costs --device cpu --shape tiny

Random weights and prompts, greedy; prompts alone, answers alone and both together take turns. Each step is predicted by
the costs that were fitted to the steps before it, and its time is the engine's own: from one step known to be done to
the next. Prints the six coefficients, the errors relative to the times (a positive median: steps are predicted too
long), and what the fit itself takes of a step. With --token-gap-ms the answers ask for that gap: the table then shows
whether steps with prompts in them keep it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.engine.steps import greedy, job_of, sequence_of
from benchmarks.shapes import CPU_SHAPES, SHAPES
from benchmarks.timing import table_header, table_row
from headrace.cache.hits import ResumeLocally
from headrace.engine.build import engine_around
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence
from headrace.forward.memory import use_device
from headrace.models.weights import random_model
from headrace.step_costs import StepShape

UNCOUNTED_STEPS = 64
"""The first steps, which the fit begins with."""

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Sizes:
    """Tokens of prompts and answers, at least and at most; sequences at once, the step's budget, the cache's GiB."""

    prompts: tuple[int, int]
    answers: tuple[int, int]
    at_once: int
    max_step_tokens: int
    cache_gib: float


FULL = Sizes((64, 16_384), (16, 256), 48, 1024, 24.0)
TINY = Sizes((16, 400), (8, 40), 8, 128, 0.25)


@dataclass(frozen=True)
class Observed:
    """A step, its seconds, and what was predicted."""

    shape: StepShape
    seconds: float
    predicted_s: float

    @property
    def kind(self) -> str:
        if not self.shape.prefill_tokens:
            return "answers"
        return "both" if self.shape.num_decoding else "prompts"


class MixedLoad:
    """Requests on one engine, driven from this thread, until a deadline."""

    def __init__(self, engine: Engine, sizes: Sizes, token_gap_s: float | None) -> None:
        self._engine = engine
        self._sizes = sizes
        self._token_gap_s = token_gap_s
        self._dice = random.Random(0)
        self._sequences: list[Sequence] = []
        self.steps: list[Observed] = []
        self.fit_s = 0.0
        self._observe, engine.cost_fit.observe = engine.cost_fit.observe, self._note  # type: ignore[method-assign]

    def run(self, until_s: float) -> None:
        """Turns of prompts that are only computed, of answers alone, and of both."""
        while time.monotonic() < until_s:
            for _ in range(self._dice.randint(1, 4)):
                self._submit(max_tokens=1)
            self._step_while_busy(until_s)
            for _ in range(self._dice.randint(1, self._sizes.at_once)):
                self._submit(self._dice.randint(*self._sizes.answers), shortest=True)
            self._step_while_busy(until_s)
            for _ in range(self._sizes.at_once // 2):
                self._submit(self._dice.randint(*self._sizes.answers))
                self._step_while_busy(until_s, most=self._dice.randint(1, 12))
            self._step_while_busy(until_s)

    def _submit(self, max_tokens: int, *, shortest: bool = False) -> None:
        least, most = self._sizes.prompts
        num_tokens = least if shortest else int(math.exp(self._dice.uniform(math.log(least), math.log(most))))
        prompt = [self._dice.randrange(5, 1000) for _ in range(num_tokens)]
        request = replace(greedy(prompt, max_tokens), token_gap_s=self._token_gap_s)
        sequence = sequence_of(self._engine, job_of(request, max_tokens, ResumeLocally(), lambda event: None))
        self._engine.submit(sequence)
        self._sequences.append(sequence)

    def _step_while_busy(self, until_s: float, most: int = 1 << 30) -> None:
        while most and time.monotonic() < until_s and self._step():
            most -= 1

    def _step(self) -> bool:
        self._engine.admit()
        is_busy = self._engine.step()
        for sequence in list(self._sequences):
            if sequence.num_sampled >= sequence.job.max_new:
                self._engine.release(sequence)
                self._sequences.remove(sequence)
        return is_busy

    def _note(self, shape: StepShape, seconds: float, **kind: bool) -> None:
        self.steps.append(Observed(shape, seconds, self._engine.cost_fit.costs.seconds(shape)))
        began_s = time.thread_time()
        self._observe(shape, seconds, **kind)
        self.fit_s += time.thread_time() - began_s


def _rows(steps: list[Observed]) -> Iterator[str]:
    for kind in ("prompts", "answers", "both", "all"):
        of_kind = [step for step in steps if kind in (step.kind, "all")]
        if not of_kind:
            continue
        times = np.array([step.seconds for step in of_kind])
        errors = np.array([step.predicted_s for step in of_kind]) / times - 1
        p50_s, p95_s, p99_s = np.percentile(times, (50, 95, 99)) * 1e3
        p50, p95 = np.percentile(np.abs(errors), (50, 95)) * 100
        yield table_row(
            kind, str(len(of_kind)), f"{p50_s:.2f}", f"{p95_s:.2f}", f"{p99_s:.2f}",
            f"{np.median(errors) * 100:+.1f} %", f"{p50:.1f} %", f"{p95:.1f} %",
        )  # fmt: skip


def main(
    shape: str = "granite-h-micro",
    device: str = "cuda",
    seconds: Annotated[float, typer.Option(help="of the load, at most 60")] = 20.0,
    token_gap_ms: Annotated[float | None, typer.Option(help="that the answers ask for")] = None,
) -> None:
    """How well an engine's own step costs predict its steps."""
    sizes = TINY if shape == "tiny" else FULL
    config = EngineConfig(
        device=device,
        state_dtype="float32" if device == "cpu" else "bfloat16",
        cache_bytes=int(sizes.cache_gib * 2**30),
        state_share=0.3,
        max_step_tokens=sizes.max_step_tokens,
        max_running=sizes.at_once,
        max_model_tokens=2 * sizes.prompts[1],
    )
    use_device(device)
    shape_config = CPU_SHAPES["granite"] if shape == "tiny" else SHAPES[shape]
    model = random_model(shape_config, getattr(torch, config.model_dtype), device)
    engine = engine_around(model, config, time.monotonic).engine
    load = MixedLoad(engine, sizes, None if token_gap_ms is None else token_gap_ms / 1e3)
    load.run(time.monotonic() + min(seconds, TIMEOUT_S))
    print(f"{shape} on {device}, costs after {len(load.steps)} steps:")
    for name, value in asdict(engine.cost_fit.costs).items():
        print(f"    {name:<10} {value:.4g}")
    print(f"the fit takes {load.fit_s / len(load.steps) * 1e6:.1f} us a step\n")
    print(table_header("steps with", "number", "p50 ms", "p95 ms", "p99 ms", "median error", "|error| p50", "p95"))
    for row in _rows(load.steps[UNCOUNTED_STEPS:]):
        print(row)
