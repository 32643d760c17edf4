"""Records of an engine's steps while its own thread runs them: what was in them, the host's phases, the device's time.

A record covers the time from the end of one step to the end of the next one, so that no time lies between two records.
The probe wraps methods of an engine and its loop before the loop starts; it costs about 20 us a step.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.timing import table_header, table_row
from headrace.engine import runner as runner_module
from headrace.engine.engine import Engine
from headrace.engine.graphs.captured_passes import Captured
from headrace.engine.loop import EngineLoop
from headrace.engine.sampling.sampler import Drawn
from headrace.forward.sequence_input import SequenceInput
from headrace.step_costs import StepCosts, StepShape

PHASES = (
    "commands",  # posted to the loop
    "admit",
    "schedule",
    "load",  # a captured pass's inputs
    "replay",
    "eager",  # passes that are launched kernel by kernel
    "draw",
    "launch",  # the rest of it
    "wait",  # for the tokens of the step before
    "take",
    "publish",
    "flush",  # events to the event loop
    "rest",
)


class PhaseClock:
    """Seconds of nested phases, each without those inside it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inside: list[float] = []

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, whose time counts as that of phase `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            self._inside.append(0.0)
            try:
                return work(*args, **kwargs)
            finally:
                taken_s = time.perf_counter() - began_s
                self.spent[name] = self.spent.get(name, 0.0) + taken_s - self._inside.pop()
                if self._inside:
                    self._inside[-1] += taken_s

        return run

    def take(self) -> dict[str, float]:
        """The seconds spent since the last call, by phase."""
        spent, self.spent = self.spent, {}
        return spent


@dataclass
class StepRecord:
    """One step. Seconds.

    passes       replayed ones, and "eager" for those that were launched
    host         by phase
    at_s         when it ended, from the start of the recording
    away_s       in which the engine's thread neither ran nor waited for the device: the interpreter's lock, or the core
    collected_s  in garbage collections of any thread
    kernel_s     of the engine's thread in the operating system
    num_faults   pages that its thread touched first, or that had been taken from it
    num_ousted   times that another thread took its core
    device_s     from the end of the step before, on the device, to the end of this one
    own_s        from where this step was launched, on the device, to its end
    """

    shape: StepShape
    num_prefills: int
    num_writes: int
    passes: list[str]
    marks: tuple[Any, Any]
    host: dict[str, float] = field(default_factory=dict)
    at_s: float = 0.0
    wall_s: float = 0.0
    away_s: float = 0.0
    collected_s: float = 0.0
    kernel_s: float = 0.0
    num_faults: int = 0
    num_ousted: int = 0
    device_s: float = 0.0
    own_s: float = 0.0

    def __str__(self) -> str:
        shape = self.shape
        prompts = (
            f" + {shape.prefill_tokens} in {self.num_prefills} ({self.num_writes})" if shape.prefill_tokens else ""
        )
        return f"{shape.num_decoding}{prompts}: {', '.join(self.passes)}"


class StepProbe:
    """Records the steps of one engine while `is_recording`; `close` takes it off again."""

    def __init__(self, engine: Engine, loop: EngineLoop, device: torch.device) -> None:
        self.is_recording = False
        self._on_gpu = device.type == "cuda"
        self._clock = PhaseClock()
        self._records: list[StepRecord] = []
        self._passes: list[str] = []
        self._launched: StepRecord | None = None
        self._collected_s, self._collecting_since_s = 0.0, 0.0
        self._wait_cpu_s = 0.0
        self._last_end: tuple[float, float, resource.struct_rusage] | None = None
        self._began_s = 0.0
        self._undo = ExitStack()
        self._wrap(engine, loop)
        gc.callbacks.append(self._collecting)
        self._undo.callback(gc.callbacks.remove, self._collecting)

    def take(self) -> list[StepRecord]:
        """The records since the last call, with the device's times; the first one has no step before it."""
        records, self._records = self._records, []
        if self._on_gpu:
            torch.cuda.synchronize()
        for before, record in pairwise(records):
            record.device_s = self._between_s(before.marks[1], record.marks[1])
            record.own_s = self._between_s(*record.marks)
        return records[1:]

    # ------------------------------------------------------------ wrapping

    def _wrap(self, engine: Engine, loop: EngineLoop) -> None:
        timed, runner = self._clock.timed, engine._runner
        for owner, method, phase in (
            (loop, "_drain", "commands"),
            (loop, "flush", "flush"),
            (engine, "admit", "admit"),
            (engine, "_schedule", "schedule"),
            (engine, "_take_tokens", "take"),
            (engine, "_publish_written", "publish"),
            (runner_module, "choose", "draw"),
        ):
            self._replace(owner, method, timed(phase, getattr(owner, method)))
        self._replace(Drawn, "ids", timed("wait", self._waited(Drawn.ids)))
        self._replace(runner, "_hidden", timed("eager", self._noted("eager", runner._hidden)))
        self._replace(runner, "launch", timed("launch", self._recorded(runner.launch)))
        self._replace(engine, "step", self._ended(timed("rest", engine.step)))
        graphs = runner._graphs
        for name, passes in (("d", graphs.decodes), ("p", graphs.prefills), *(("m", mix) for mix in graphs.mixes)):
            if passes is not None:
                self._replace(passes.inputs, "load", timed("load", passes.inputs.load))
                for size, captured in passes._graphs.items():
                    replay = timed("replay", self._noted(f"{name}{size}", captured.replay))
                    passes._graphs[size] = Captured(replay, captured.logits)

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, method)

    def _noted(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._passes.append(name)
            return work(*args)

        return run

    def _waited(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began_s = time.thread_time()
            try:
                return work(*args)
            finally:
                self._wait_cpu_s += time.thread_time() - began_s

        return run

    def _recorded(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(inputs: Sequence[SequenceInput], *args: Any) -> Any:
            began, self._passes = self._mark(), []
            launched = launch(inputs, *args)
            prefills = [entry for entry in inputs if not entry.is_decode]
            self._launched = StepRecord(
                shape=step_shape(inputs),
                num_prefills=len(prefills),
                num_writes=sum(1 + len(entry.emit) for entry in prefills),
                passes=self._passes,
                marks=(began, self._mark()),
            )
            return launched

        return run

    def _ended(self, step: Callable[[], bool]) -> Callable[[], bool]:
        def run() -> bool:
            did_something = step()
            usage = resource.getrusage(resource.RUSAGE_THREAD)
            end, before = (time.perf_counter(), time.thread_time(), usage), self._last_end
            host, record, self._launched = self._clock.take(), self._launched, None
            if record is not None and before is not None and self.is_recording:
                record.host, record.wall_s = host, end[0] - before[0]
                self._began_s = self._began_s if self._records else end[0]
                record.at_s = end[0] - self._began_s
                record.kernel_s = usage.ru_stime - before[2].ru_stime
                record.num_faults = usage.ru_minflt - before[2].ru_minflt
                record.num_ousted = usage.ru_nivcsw - before[2].ru_nivcsw
                waited_s = host.get("wait", 0.0) - self._wait_cpu_s
                record.away_s = max(0.0, record.wall_s - (end[1] - before[1]) - waited_s)
                record.collected_s = self._collected_s
                self._records.append(record)
            self._last_end = end if did_something else None
            self._wait_cpu_s = self._collected_s = 0.0
            return did_something

        return run

    def _collecting(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._collecting_since_s = time.perf_counter()
        else:
            self._collected_s += time.perf_counter() - self._collecting_since_s

    def close(self) -> None:
        self._undo.close()

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between_s(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3 if self._on_gpu else second - first


def step_shape(inputs: Iterable[SequenceInput]) -> StepShape:
    shape = StepShape()
    for entry in inputs:
        if entry.is_decode:
            shape += StepShape(num_decoding=1, context_tokens=entry.end)
        else:
            shape += StepShape.prefill(entry.start, entry.end)
    return shape


# ------------------------------------------------------------ tables


def summary_header() -> str:
    return table_header(
        "load",
        "steps",
        "step ms p50 / p95 / p99 / max",
        "by its contents p50 / p99",
        "over twice that",
        "gap ms p50 / p95 / p99 / max",
        "launched",
        "away ms p99 / max",
        "GC ms max",
    )


def summary_row(name: str, records: Sequence[StepRecord], gaps_s: Sequence[float], costs: StepCosts) -> str:
    """A load's row: steps by the device, gaps between a sequence's tokens as the event loop sees them."""
    steps, predicted = [r.device_s for r in records], [costs.seconds(r.shape) for r in records]
    over = np.mean([step > 2 * expected for step, expected in zip(steps, predicted, strict=True)])
    away = [record.away_s for record in records]
    return table_row(
        name,
        len(records),
        _ms(steps, 50, 95, 99, 100),
        _ms(predicted, 50, 99),
        f"{over:.1%}",
        _ms(gaps_s, 50, 95, 99, 100),
        f"{np.mean(['eager' in record.passes for record in records]):.1%}",
        _ms(away, 99, 100),
        _ms([record.collected_s for record in records], 100),
    )


def phases_header() -> str:
    return table_header("host ms a step, p50 / p99", *PHASES)


def phases_row(name: str, records: Sequence[StepRecord]) -> str:
    return table_row(name, *(_ms([r.host.get(phase, 0.0) for r in records], 50, 99) for phase in PHASES))


def slowest_header() -> str:
    return table_header(
        "load",
        "at s",
        "step ms",
        "by its contents",
        "own ms",
        "host ms",
        "away",
        "GC",
        "kernel",
        "faults, ousted",
        "contents",
        "phases",
    )


def slowest_rows(name: str, records: Sequence[StepRecord], costs: StepCosts, count: int) -> list[str]:
    """The steps that took longest beyond what their contents cost.

    `contents`: decodes + prompts' tokens in sequences (states written): passes.
    """
    beyond = sorted(records, key=lambda record: costs.seconds(record.shape) - record.device_s)
    rows = []
    for record in beyond[:count]:
        phases = sorted(record.host.items(), key=lambda item: -item[1])[:4]
        seconds = record.device_s, costs.seconds(record.shape), record.own_s, record.wall_s
        rows.append(
            table_row(
                name,
                f"{record.at_s:.2f}",
                *(f"{1e3 * s:.2f}" for s in (*seconds, record.away_s, record.collected_s, record.kernel_s)),
                f"{record.num_faults}, {record.num_ousted}",
                record,
                ", ".join(f"{phase} {1e3 * s:.1f}" for phase, s in phases),
            )
        )
    return rows


def _ms(seconds: Sequence[float], *percentiles: float) -> str:
    if not len(seconds):
        return "-"
    return " / ".join(f"{1e3 * value:.2f}" for value in np.percentile(seconds, percentiles))
