"""Decode steps with drafts through the whole engine on a GPU, beside plain ones: which drafts are right is pinned.

    python3 -m benchmarks gpu-speculation [--shape qwen35-4b] [--batch 1 --batch 64] [--drafts 3]
    python -m benchmarks gpu-speculation --device cpu --shrink

Weights are random, so what their drafts are worth says nothing. Which of them are right is pinned
(benchmarks/pinned_drafts.py): with 2 drafts 2.73 tokens a step, with 3 drafts 3.39, the lengths that others publish for
trained layers ("golden"), and none at all under `auto`. Each shape drafts with an MTP layer: granite-h-micro, which has
none, with one that is put together as Qwen's are, of its own widths and heads.

Each row times the same tokens of each answer, `--tokens` behind WARM_UP_TOKENS: with drafts that takes fewer steps.
With as many steps they would be at longer contexts than plain ones.

`check` and `draft` are the device's milliseconds of the pass that checks drafts and of those that make them, launches
and waits included: what is left is the host's, and not hidden. Pinning takes a kernel and a copy of that. `host` is all
that the host does in a step, hidden or not. A row is the median round by its tokens a second, since one pause of the
host is a good part of a round's half second.
`states` is the part of a check in which states are written, by replaying it with and without: sequences stand at all
places of a block, so that some of them write theirs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer

from benchmarks.engine.steps import Batch, greedy
from benchmarks.pinned_drafts import GOLDEN, PinnedDrafts, RightDrafts, tokens_a_step
from benchmarks.shapes import SHAPES, random_prompts, shrunk
from benchmarks.timing import table_header, table_row, verdict
from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.tails import Tail, tail_interval
from headrace.engine.build import BuiltEngine, engine_around
from headrace.engine.config import EngineConfig
from headrace.engine.drafts.ahead import DraftsAhead
from headrace.engine.graphs.verify_inputs import VerifyInputs
from headrace.engine.runner import Launched
from headrace.forward.memory import use_device
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.sampling.checked_rows import CheckField
from headrace.models.config import ModelConfig
from headrace.models.families.qwen import load_qwen_mtp
from headrace.models.weights import FAMILIES, random_model
from headrace.pauses import keep_pauses_short
from headrace.speculation.config import SpeculationConfig
from headrace.speculation.draft_count import AutoCount, FixedCount

ASKED = {1: 2.2, 64: 1.9}  # times plain decoding
ASKED_OF_AUTO = 0.97
WARM_UP_TOKENS = 64  # of each answer


class Probe:
    """Pins the drafts of an engine, and adds up the milliseconds of its checks and drafts, and of waits for tokens."""

    def __init__(self, built: BuiltEngine, device: str) -> None:
        self._runner = built.engine._runner
        self._is_cuda = device != "cpu"
        self._launch, self._draft, self._ahead = (
            self._runner.launch,
            self._runner.draft_tokens,
            self._runner.draft_ahead,
        )
        self._runner.launch = self._launched  # type: ignore[method-assign]
        self._runner.draft_tokens = self._drafted  # type: ignore[method-assign]
        self._runner.draft_ahead = self._drafted_ahead  # type: ignore[method-assign,assignment]
        self._pinned = PinnedDrafts(self._runner)  # around what is timed
        self._launch_pinned = self._runner.launch
        self._runner.launch = self._waited_for  # type: ignore[method-assign]
        self.reset(())

    def reset(self, shares: Sequence[float]) -> None:
        """Begins to count anew; drafts are right by these shares from now on, as in `RightDrafts`."""
        self._pinned.right = RightDrafts(shares)
        self._waited_ms = self._token_wait_ms = 0.0
        self._checks: list[tuple[Any, Any]] = []
        self._passes: list[tuple[Any, Any]] = []

    @property
    def check_ms(self) -> float:
        return self._sum_ms(self._checks)

    @property
    def draft_ms(self) -> float:
        return self._waited_ms + self._sum_ms(self._passes)

    @property
    def wait_ms(self) -> float:
        """Milliseconds in which the host waited for tokens or drafts."""
        return self._token_wait_ms + self._waited_ms

    def _sum_ms(self, parts: list[tuple[Any, Any]]) -> float:
        if not self._is_cuda:
            return sum(end - start for start, end in parts)
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in parts)

    def _launched(self, inputs: Sequence[SequenceInput], *rest: Any) -> Launched:
        if not any(entry.has_drafts for entry in inputs):
            return self._launch(inputs, *rest)
        start = self._now()
        launched = self._launch(inputs, *rest)
        self._checks.append((start, self._now()))
        return launched

    def _waited_for(self, *step: Any) -> Launched:
        launched = self._launch_pinned(*step)
        ids = launched.drawn.ids

        def timed_ids() -> list[int]:
            began_s = time.perf_counter()
            found = ids()
            self._token_wait_ms += 1e3 * (time.perf_counter() - began_s)
            return found

        launched.drawn.ids = timed_ids  # type: ignore[method-assign]
        return launched

    def _drafted(self, starts: Any) -> list[list[int]]:
        began_s = time.perf_counter()
        drafts = self._draft(starts)
        self._waited_ms += 1e3 * (time.perf_counter() - began_s)
        return drafts

    def _drafted_ahead(self, *starts: Any) -> DraftsAhead | None:
        start = self._now()
        made = self._ahead(*starts)
        self._passes.append((start, self._now()))
        return made

    def _now(self) -> Any:
        if not self._is_cuda:
            return 1e3 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step, and what it gives."""

    tokens_a_second: float
    step_ms: float
    tokens_a_step: float
    check_ms: float
    draft_ms: float
    host_ms: float


def timed(built: BuiltEngine, probe: Probe, size: int, context: int, num_tokens: int, shares: Sequence[float]) -> Times:
    """Steps of `size` sequences that all decode, until each has about `num_tokens` more."""
    max_tokens = most_tokens(num_tokens)
    tokens_a_step = 1 + sum(shares)
    num_steps = round(num_tokens / tokens_a_step)
    probe.reset(shares)
    prompts = random_prompts(size, context, seed=size, vocabulary=1000)
    batch = Batch(built.engine, [greedy(prompt, max_tokens) for prompt in prompts], max_tokens)
    while not all(batch.arrivals) or any(sequence.is_prefilling for sequence in batch.sequences):
        batch.step()
    batch.step(round(WARM_UP_TOKENS / tokens_a_step))
    probe.reset(shares)
    before, began_s = batch.num_tokens, time.perf_counter()
    batch.step(num_steps)
    seconds, num_made = time.perf_counter() - began_s, batch.num_tokens - before
    step_ms = 1e3 * seconds / num_steps
    times = Times(
        num_made / seconds,
        step_ms,
        num_made / num_steps / size,
        probe.check_ms / num_steps,
        probe.draft_ms / num_steps,
        host_ms=step_ms - probe.wait_ms / num_steps,
    )
    batch.release()
    return times


def most_tokens(num_tokens: int) -> int:
    """The most tokens of an answer, of which so many are timed: no answer may end while it is."""
    return 2 * (WARM_UP_TOKENS + num_tokens)


def median_round(rounds: Sequence[Times]) -> Times:
    """The round with the median of tokens a second, the lower one of two; prints those of all."""
    in_order = sorted(rounds, key=lambda times: times.tokens_a_second)
    print("  tokens/s by rounds: " + ", ".join(f"{times.tokens_a_second:,.0f}" for times in rounds))
    return in_order[(len(in_order) - 1) // 2]


@torch.inference_mode()
def states_ms(built: BuiltEngine, size: int, num_drafts: int, context: int) -> float | None:
    """Milliseconds of a captured check in which it writes states; None where nothing is captured.

    The cache means nothing any more: it reads and writes blocks and states whatever lies there.
    """
    block_size, num_rows = built.layout.block_size, num_drafts + 1
    interval, width = tail_interval(block_size), -(-(context + num_rows) // block_size)
    inputs = []
    for sequence in range(size):
        start = context - sequence % interval
        tail = Tail(sequence, start - start % interval).step(ChunkSpan(start, start + num_rows), interval)
        blocks = range(sequence * width, (sequence + 1) * width)
        tokens = [1] * num_rows
        inputs.append(SequenceInput(tokens, start, blocks, sequence, sequence, num_logits=num_rows, tail=tail))
    passes = next((each for each in built.engine._runner._graphs.checks if each.fits(inputs)), None)
    if passes is None:
        return None
    writing_ms = _replays_ms(lambda: passes.run(inputs))
    assert isinstance(passes.inputs, VerifyInputs)
    replay = passes._graphs[next(rows for rows in passes.sizes if rows >= passes.inputs.num_rows(inputs))].replay
    with_ms = _replays_ms(replay)
    passes.inputs._fields[:, CheckField.WRITTEN] = -1
    without_ms = _replays_ms(replay)
    print(
        f"  a check of {size}: {writing_ms:.3f} ms with inputs, {with_ms:.3f} replayed, {without_ms:.3f} without states"
    )
    return with_ms - without_ms


def _replays_ms(work: Callable[[], object], number: int = 20) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    start.record()
    for _ in range(number):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / number


@dataclass(frozen=True)
class Setup:
    """Settings that all engines of a table share."""

    name: str
    config: ModelConfig
    device: str
    batches: Sequence[int]
    context: int
    num_tokens: int
    num_rounds: int
    cache_gib: float
    draft_vocabulary: int

    def engine(self, num_drafts: int) -> BuiltEngine:
        """An engine that drafts so many tokens, as its model does."""
        drafter = "mtp" if num_drafts else "none"
        config = EngineConfig(
            device=self.device,
            state_dtype="float32" if self.device == "cpu" else "bfloat16",
            cache_bytes=int(self.cache_gib * 2**30),
            state_share=0.75,
            max_step_tokens=512,
            max_running=max(self.batches),
            max_model_tokens=self.context + most_tokens(self.num_tokens),
            speculation=SpeculationConfig(drafter, "fixed", max(1, num_drafts), draft_vocabulary=self.draft_vocabulary),
        )
        gc.unfreeze()
        gc.collect()  # the engine before: its probe refers to it in a circle
        began_s = time.perf_counter()
        dtype = getattr(torch, config.model_dtype)
        vocabulary = self.draft_vocabulary
        model = random_model(self.config, dtype, self.device, with_mtp=num_drafts > 0, draft_vocabulary=vocabulary)
        built = engine_around(model, config, time.monotonic)
        keep_pauses_short()  # as a node does
        print(f"{self.name}, {num_drafts} drafts: ready after {time.perf_counter() - began_s:.1f} s", flush=True)
        return built

    def timed(self, built: BuiltEngine, probe: Probe, size: int, shares: Sequence[float]) -> Times:
        """The median round of steps with drafts that are right by these shares."""
        args = built, probe, size, self.context, self.num_tokens, shares
        return median_round([timed(*args) for _ in range(self.num_rounds)])


def compare(setup: Setup, drafts: Sequence[int]) -> None:
    """Prints the table of one shape."""
    built = setup.engine(0)
    probe = Probe(built, setup.device)
    plain = {size: setup.timed(built, probe, size, ()) for size in setup.batches}
    del built, probe
    rows = [_row(f"batch {size}, plain", times) for size, times in plain.items()]
    for num_drafts in drafts:
        built = setup.engine(num_drafts)
        probe, drafting = Probe(built, setup.device), built.engine.drafting
        assert drafting is not None
        most = max(setup.batches) * num_drafts
        pinned, auto = {}, {}
        for size in setup.batches:
            drafting.count = FixedCount(most)
            pinned[size] = setup.timed(built, probe, size, GOLDEN[:num_drafts])
            if num_drafts == max(drafts):
                drafting.count = AutoCount(most)
                auto[size] = setup.timed(built, probe, size, ())
        for size, times in pinned.items():
            states = states_ms(built, size, num_drafts, setup.context)
            name = f"batch {size}, {num_drafts} drafts, {tokens_a_step(num_drafts) - 1:.2f} right, pinned"
            rows.append(_row(name, times, plain[size], ASKED.get(size), states))
        for size, times in auto.items():
            rows.append(_row(f"batch {size}, auto, no draft is right", times, plain[size], ASKED_OF_AUTO))
        del built, probe, drafting
    parts = "check ms", "states ms", "draft ms", "rest ms", "host ms"
    header = table_header(setup.name, "tokens/s", "x plain", "asked", "", "ms a step", "tokens a step", *parts)
    print(f"\n{header}")
    print("\n".join(rows) + "\n", flush=True)


def _row(
    name: str, times: Times, plain: Times | None = None, asked: float | None = None, states: float | None = None
) -> str:
    ratio = None if plain is None else times.tokens_a_second / plain.tokens_a_second
    rest_ms = times.step_ms - times.check_ms - times.draft_ms
    return table_row(
        name,
        f"{times.tokens_a_second:,.0f}",
        _cell(ratio),
        _cell(asked),
        verdict(None if ratio is None or asked is None else ratio >= asked),
        f"{times.step_ms:.3f}",
        f"{times.tokens_a_step:.2f}",
        *(_cell(value) for value in (times.check_ms, states, times.draft_ms, rest_ms, times.host_ms)),
    )


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def main(
    shape: list[str] = ["qwen35-4b", "granite-h-micro"],  # noqa: B006
    batch: list[int] = [1, 64],  # noqa: B006
    drafts: Annotated[list[int], typer.Option(help="2, 3 or both: their lengths are published")] = [3],  # noqa: B006
    context: int = 256,
    tokens: Annotated[int, typer.Option(min=1, help="of each answer that are timed")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="of which the median is shown")] = 3,
    device: str = "cuda",
    cache_gib: float = 48.0,
    draft_vocabulary: Annotated[int, typer.Option(help="tokens that the layer chooses from at a time; 0: all")] = (
        SpeculationConfig.draft_vocabulary
    ),
    shrink: Annotated[bool, typer.Option("--shrink", help="tiny shapes: a trial of this file")] = False,
) -> None:
    """Decoding with drafts beside plain decoding; which drafts are right is pinned to the published lengths."""
    use_device(device)
    for name in shape:
        config = shrunk(SHAPES[name]) if shrink else SHAPES[name]
        family = FAMILIES[config.architecture]
        if family.load_mtp is None:  # in this process alone
            FAMILIES[config.architecture] = replace(family, load_mtp=load_qwen_mtp)
        compare(Setup(name, config, device, batch, context, tokens, rounds, cache_gib, draft_vocabulary), drafts)
