"""The engine's forward passes on one GPU beside vLLM's times and the chip's floor: prefill and decode, random weights.

    python3 -m benchmarks gpu-engine [--shape granite-h-micro] [--quantization fp8] [--only "decode batch 1"]
                                     [--chunk 8192] [--no-graphs] [--profile FILE] [--device cpu --shrink]

The rows (works.py) are those of the first table of shared/anchors/h200.md, and shorter prefills. `--only` takes a
row's whole name, in which * stands for anything, and may be repeated: "prefill 16 x 4,096", "decode*". What a row is
held to depends on shape and format (targets.py).

Drives `ModelRunner` as the engine does: prompts in chunks, decode steps one ahead of the host, which reads the tokens
of one step while the next one runs. Times are CUDA events, the median of several rounds after a warm-up; `host` is the
host's time to launch a prefill or one decode step, hidden as long as it stays below the work itself.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.engine.targets import TARGETS, Target, WeightFormat, floor_ms
from benchmarks.engine.works import BLOCK_SIZE, DECODE_STEPS, Decode, Prefill, named, shrunk_works
from benchmarks.shapes import MOE_SHAPES, SHAPES, random_prompts, shrunk
from benchmarks.timing import profile, table_header, table_row, verdict
from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.tails import Tail, tail_interval
from headrace.engine.runner import Launched, ModelRunner
from headrace.engine.sampling.draw import Draw
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.config import ModelConfig
from headrace.models.weights import random_model
from headrace.request import Sampling

WARM_UPS = 2
GREEDY = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), 0)


@dataclass(frozen=True)
class Result:
    work: Prefill | Decode
    ms: float  # of the whole prefill, or of one decode step
    host_ms: float  # to launch that


def _decode_input(
    sequence: int, token: Sequence[int], start: int, blocks: Sequence[int], *, is_future: bool
) -> SequenceInput:
    interval = tail_interval(BLOCK_SIZE)
    tail = Tail(sequence, start - start % interval).step(ChunkSpan(start, start + 1), interval)
    future_token = sequence if is_future else None
    return SequenceInput(token, start, blocks, sequence, sequence, future_token=future_token, tail=tail)


class Bench:
    """One model of a shape, with cache memory for the largest of `works`; prompts in chunks of `chunk` tokens."""

    def __init__(
        self,
        config: ModelConfig,
        works: Sequence[Prefill | Decode],
        device: str,
        rounds: int,
        chunk: int,
        has_graphs: bool,
        quantization: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._rounds, self._chunk = rounds, chunk
        on_cpu = self.device.type == "cpu"
        started_s = time.perf_counter()
        model = random_model(config, torch.float32 if on_cpu else torch.bfloat16, device, quantization=quantization)
        num_blocks = max(work.num_sequences * work.num_blocks for work in works)
        layout = model.cache_layout(BLOCK_SIZE, "float32" if on_cpu else "bfloat16")
        memory = CacheMemory(layout, num_blocks, max(work.num_slots for work in works), device)
        self.runner, self.launching_runner = ModelRunner(model, memory), ModelRunner(model, memory)
        for pool in memory.pools:  # decodes start from states that no pass computed
            pool.normal_(0, 0.1)
        for ring in (part for tail in memory.tails for part in tail.parts):
            ring.zero_()
        decodes = [work for work in works if isinstance(work, Decode)]
        prefills = [work for work in works if isinstance(work, Prefill)]
        if has_graphs and decodes:
            largest = max(work.num_sequences for work in decodes)
            self.runner.capture_decodes(largest, max(work.num_blocks for work in decodes) * BLOCK_SIZE)
        if has_graphs and prefills:
            self.runner.capture_prefills(chunk, max(work.num_tokens for work in prefills))
        self._sync()
        self.load_s = time.perf_counter() - started_s

    def run(self, work: Prefill | Decode) -> Result:
        host: list[float] = []
        num_steps = DECODE_STEPS if isinstance(work, Decode) else 1
        times = [self._time(lambda: host.append(self._once(work))) for _ in range(WARM_UPS + self._rounds)]
        return Result(work, statistics.median(times[WARM_UPS:]) / num_steps, statistics.median(host))

    def profiled(self, work: Prefill | Decode) -> str:
        return profile(lambda: self._once(work))

    def _once(self, work: Prefill | Decode) -> float:
        return self._prefill(work) if isinstance(work, Prefill) else self._decode(work)

    def _prefill(self, work: Prefill) -> float:
        """The host's milliseconds to launch it."""
        launched = None
        runner, chunks = self.launching_runner if work.is_launched else self.runner, prefill_steps(work, self._chunk)
        started_s = time.perf_counter()
        for steps in chunks:
            ends = [step.end == work.num_tokens for step in steps]
            draws = [(row, GREEDY) for row in range(sum(ends))]
            launched = runner.launch(steps, draws)
        taken_ms = 1e3 * (time.perf_counter() - started_s)
        assert launched is not None
        check(launched)
        return taken_ms

    def _decode(self, work: Decode) -> float:
        """`DECODE_STEPS` steps; the host's median milliseconds to launch one.

        Sequences stand at all places of a block, as where requests come and go: some write their states in each step.
        Sequences begin with different tokens: with the same one, they would all choose nearly the same experts.
        """
        prompts = random_prompts(work.num_sequences, 1, vocabulary=1000)
        draws = [(row, GREEDY) for row in range(work.num_sequences)]
        blocks = [_blocks_of(sequence, work) for sequence in range(work.num_sequences)]
        before: Launched | None = None
        taken = []
        for n in range(DECODE_STEPS):
            started_s = time.perf_counter()
            steps = [
                _decode_input(i, prompts[i], work.context + n - i % BLOCK_SIZE, blocks[i], is_future=before is not None)
                for i in range(work.num_sequences)
            ]
            launched = self.runner.launch(steps, draws)
            taken.append(1e3 * (time.perf_counter() - started_s))
            if before is not None:
                before.drawn.tokens()
            before = launched
        assert before is not None
        check(before)
        return statistics.median(taken)

    def _time(self, work: Callable[[], object]) -> float:
        """Milliseconds on the device, the gaps included in which it waits for the host."""
        if self.device.type == "cpu":
            started_s = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - started_s)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._sync()
        start.record()
        work()
        end.record()
        self._sync()
        return start.elapsed_time(end)

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def check(launched: Launched) -> None:
    """Raises RuntimeError if the pass computed nonsense, whose time is worth nothing."""
    if not launched.logits.rows.isfinite().all():
        raise RuntimeError("the logits are not finite: a kernel is wrong")


def prefill_steps(work: Prefill, chunk: int) -> list[list[SequenceInput]]:
    """The engine's chunks: prompts in order, as many tokens a step as its budget takes."""
    (prompt,) = random_prompts(1, work.num_tokens, vocabulary=1000)
    spacing = work.num_tokens // work.num_checkpoints // BLOCK_SIZE * BLOCK_SIZE
    boundaries = [work.num_tokens - spacing * i for i in range(work.num_checkpoints - 1, 0, -1)]
    chunks, step, budget = [], [], chunk
    for sequence in range(work.num_sequences):
        start = work.num_cached
        while start < work.num_tokens:
            end = min(work.num_tokens, start + budget)
            emit = tuple((b, work.num_sequences + i) for i, b in enumerate(boundaries) if start < b < end)
            blocks, src = _blocks_of(sequence, work), sequence if start else None
            num_logits = int(end == work.num_tokens)
            step.append(SequenceInput(prompt[start:end], start, blocks, src, sequence, emit, num_logits))
            budget -= end - start
            start = end
            if budget == 0:
                chunks.append(step)
                step, budget = [], chunk
    return [*chunks, step] if step else chunks


def _blocks_of(sequence: int, work: Prefill | Decode) -> range:
    return range(sequence * work.num_blocks, (sequence + 1) * work.num_blocks)


def print_table(
    title: str,
    config: ModelConfig,
    weight_format: WeightFormat,
    results: Sequence[Result],
    targets: Mapping[str, Target],
) -> None:
    print()
    print(table_header(title, "ms", "tokens/s", "vLLM 0.26 ms", "floor ms", "x floor", "to reach ms", "", "host ms"))
    for result in results:
        work, floor = result.work, floor_ms(result.work, config, weight_format)
        target = targets.get(work.name, Target())
        reach = target.ms(floor)
        rate, times_floor = f"{1e3 * work.num_rows / result.ms:,.0f}", f"{result.ms / floor:.2f}"
        met = verdict(None if reach is None else result.ms <= reach)
        ours = _ms(result.ms), rate, _ms(target.vllm_ms), _ms(floor), times_floor
        print(table_row(work.name, *ours, _ms(reach), met, _ms(result.host_ms)))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(
    shape: Annotated[list[str], typer.Option(help=f"any of {', '.join(SHAPES | MOE_SHAPES)}")] = [  # noqa: B006
        "granite-h-micro",
        "qwen35-4b",
    ],
    device: str = "cuda",
    only: Annotated[list[str], typer.Option(help="rows of this name; * stands for anything")] = [],  # noqa: B006
    chunk: Annotated[int, typer.Option(help="tokens a prefill step")] = 8192,
    rounds: int = 5,
    graphs: bool = True,
    profile_to: Annotated[Path | None, typer.Option("--profile", help="write where each row's time goes here")] = None,
    quantization: Annotated[str | None, typer.Option(help="fp8: weights are quantised as they are made")] = None,
    shrink: Annotated[bool, typer.Option("--shrink", help="tiny shapes and works: a trial of this file")] = False,
) -> None:
    """Prefill and decode on a GPU beside vLLM and the chip's floor."""
    works = shrunk_works(named(only)) if shrink else named(only)
    if quantization not in (None, "fp8"):
        raise typer.BadParameter(f"quantization {quantization}: must be fp8 or left out")
    weight_format: WeightFormat = "bf16" if quantization is None else "fp8"
    for name in shape:
        config = (SHAPES | MOE_SHAPES)[name]
        targets = TARGETS.get((name, weight_format), {})
        if shrink:
            config, targets = shrunk(config), {}
        bench = Bench(config, works, device, rounds, chunk, graphs and device != "cpu", quantization)
        title = f"{name}, {weight_format}"
        print(f"\n{title}: weights, memory and graphs after {bench.load_s:.1f} s", flush=True)
        results = []
        for work in works:
            results.append(bench.run(work))
            print(f"  {work.name}: {results[-1].ms:.2f} ms", flush=True)
            if profile_to is not None:
                with profile_to.open("a") as file:
                    file.write(f"## {title}: {work.name}\n\n{bench.profiled(work)}\n\n")
        print_table(title, config, weight_format, results, targets)
        del bench  # before the next shape's weights are made
