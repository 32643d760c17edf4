"""Drives an engine without threads: jobs in, events out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from headrace.cache.hits import HitPolicy, PrefixHit, ResumeLocally
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.sequence import Event, Finished, Job, Sampled, Sequence
from headrace.models.weights import load_config, load_model
from headrace.request import Request, Sampling
from headrace.speculation.config import MTP
from headrace.token_array import TokenArray
from tests.support.patience import PATIENCE_S

SMALL = EngineConfig(cache_bytes=16 << 20, max_step_tokens=256, max_running=16, threads=1)
GREEDY = Sampling(max_tokens=16, seed=0, temperature=0.0, ignore_eos=True)


def small_engine(path: Path, clock: Callable[[], float] = time.monotonic, **changes: object) -> BuiltEngine:
    return build_engine(str(path), replace(SMALL, **changes), clock)


def sized(path: Path, num_blocks: int, num_slots: int, **changes: object) -> EngineConfig:
    """The config of a small engine with pools of exactly these sizes."""
    config = replace(SMALL, **changes)
    if config.speculation.drafter == MTP:
        layout = load_model(path, with_mtp=True).cache_layout(config.block_size)
    else:
        layout = load_config(path).cache_layout("any", config.model_dtype, config.block_size)
    block_bytes, state_bytes = (num_blocks + 0.5) * layout.block_bytes, (num_slots + 0.5) * layout.state_bytes
    cache_bytes = int(block_bytes + state_bytes)
    return replace(config, cache_bytes=cache_bytes, state_share=state_bytes / cache_bytes)


def engine_of(path: Path, num_blocks: int, num_slots: int, **changes: object) -> BuiltEngine:
    """A small engine with pools of exactly these sizes."""
    built = build_engine(str(path), sized(path, num_blocks, num_slots, **changes), time.monotonic)
    assert (built.sizes.num_blocks, built.sizes.num_slots) == (num_blocks, num_slots)
    return built


def request(prompt: list[int], sampling: Sampling = GREEDY, **more: object) -> Request:
    return Request("r", TokenArray.of(prompt), len(prompt), sampling, **more)


def resume_locally(hit: PrefixHit) -> HitPolicy:
    return ResumeLocally()


@dataclass
class Run:
    """One submitted job and its events so far."""

    sequence: Sequence
    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [event.token.id for event in self.events if isinstance(event, Sampled)]

    @property
    def is_finished(self) -> bool:
        return any(isinstance(event, Finished) for event in self.events)


def submit(built: BuiltEngine, asked: Request, **changes: object) -> Run:
    """Queues a request that the engine serves alone, from prompt to last token."""
    events: list[Event] = []
    job = Job(asked, resume_locally, asked.sampling.max_tokens, time.monotonic() + PATIENCE_S, events.append)
    sequence = built.engine.intake.sequence(replace(job, **changes))
    for _ in built.engine.intake.hash_prompt(sequence):
        pass
    built.engine.intake.compile_grammar(sequence)
    built.engine.submit(sequence)
    return Run(sequence, events)


def run_all(built: BuiltEngine) -> None:
    """Steps until the engine is idle; the pools' invariants are checked after each step."""
    for _ in range(10_000):
        built.engine.admit()
        if not built.engine.step():
            return
        built.engine.cache.check()
    raise AssertionError("the engine is still busy after 10,000 steps")


def generate(built: BuiltEngine, asked: Request, **changes: object) -> Run:
    """Runs one request from submission to release."""
    run = submit(built, asked, **changes)
    run_all(built)
    built.engine.release(run.sequence)
    return run


def serve(built: BuiltEngine, *runs: Run) -> None:
    """Steps until all have finished; releases each as soon as it has, as a node does."""
    for _ in range(10_000):
        built.engine.admit()
        built.engine.step()
        built.engine.cache.check()
        for run in runs:
            if run.is_finished:
                built.engine.release(run.sequence)
        if all(run.is_finished for run in runs):
            return
    raise AssertionError("not finished after 10,000 steps")


def assert_nothing_in_use(built: BuiltEngine) -> None:
    stats = built.engine.cache.stats()
    assert (stats.blocks.in_use, stats.slots.in_use) == (0, 0)


def fail_launches(built: BuiltEngine, should_fail: Callable[[list], bool], *, after_writing: bool = True) -> None:
    """Launches that `should_fail` chooses run out of memory: at the end, when every layer has written."""
    launch = built.engine._runner.launch

    def launch_or_fail(inputs, *rest):
        fails = should_fail(inputs)
        if after_writing or not fails:
            launched = launch(inputs, *rest)
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.14 GiB\nmore lines")
        return launched

    built.engine._runner.launch = launch_or_fail
