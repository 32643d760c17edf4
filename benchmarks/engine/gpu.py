"""The engine's forward passes on one GPU beside vLLM's times and the chip's floor: prefill and decode, random weights.

    python3 -m benchmarks gpu-engine [--shape granite-h-micro] [--only batch] [--chunk 8192] [--no-graphs]
                                     [--profile FILE] [--device cpu --shrink]

The work of the first table of shared/anchors/h200.md. Drives `ModelRunner` as the engine does: prompts in chunks,
decode steps one ahead of the host, which reads the tokens of one step while the next one runs. Times are CUDA events,
the median of several rounds after a warm-up; `host` is the host's time to launch a prefill or one decode step, hidden
as long as it stays below the work itself.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.shapes import GRANITE_H_MICRO, SHAPES, random_prompts
from benchmarks.timing import BYTES_A_SECOND, FLOPS_A_SECOND, profile, table_header, table_row, verdict
from headrace.engine.draw import Draw
from headrace.engine.runner import Launched, ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.config import ModelConfig
from headrace.models.flops import num_weights
from headrace.models.weights import random_model
from headrace.request import Sampling

BLOCK_SIZE = 16
DECODE_STEPS = 32  # timed together
WARM_UPS = 2
GREEDY = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), 0)


@dataclass(frozen=True)
class Work:
    """One row of the anchor; milliseconds are those of granite-h-micro, None where the anchor has no figure."""

    name: str
    num_sequences: int
    vllm_ms: float | None
    reach_ms: float | None


@dataclass(frozen=True)
class Prefill(Work):
    """Prompts of `num_tokens`, the first `num_cached` of them cached, from start to first token.

    `num_checkpoints` states are kept in each prompt on the way. Short prefills are replays of graphs, unless
    `is_launched` kernel by kernel.
    """

    num_tokens: int = 0
    num_checkpoints: int = 1
    num_cached: int = 0
    is_launched: bool = False

    @property
    def num_rows(self) -> int:
        """Tokens that are computed."""
        return self.num_sequences * (self.num_tokens - self.num_cached)

    @property
    def num_blocks(self) -> int:
        """Blocks of each sequence."""
        return -(-self.num_tokens // BLOCK_SIZE)

    @property
    def num_slots(self) -> int:
        return self.num_sequences + self.num_checkpoints - 1


@dataclass(frozen=True)
class Decode(Work):
    """One step in which each sequence has `context` tokens behind it."""

    context: int = 256

    @property
    def num_rows(self) -> int:
        return self.num_sequences

    @property
    def num_blocks(self) -> int:
        return -(-(self.context + DECODE_STEPS) // BLOCK_SIZE)

    @property
    def num_slots(self) -> int:
        return self.num_sequences


def short_prefill(num_new: int, is_launched: bool) -> Prefill:
    name = f"prefill {num_new:,} behind 8,176{', launched' if is_launched else ''}"
    return Prefill(name, 1, None, None, num_tokens=8176 + num_new, num_cached=8176, is_launched=is_launched)


WORKS: tuple[Prefill | Decode, ...] = (
    Prefill("prefill 2,048", 1, 52.6, 30.0, num_tokens=2048),
    Prefill("prefill 8,192", 1, 111.5, 90.0, num_tokens=8192),
    Prefill("prefill 32,768", 1, 473.0, 380.0, num_tokens=32768),
    Prefill("prefill 32,768, 64 checkpoints", 1, None, None, num_tokens=32768, num_checkpoints=64),
    Prefill("prefill 16 x 4,096", 16, 65536 / 71.5, 65536 / 90.0, num_tokens=4096),
    *(short_prefill(num_new, launched) for num_new in (16, 64, 256, 512, 1024, 2048) for launched in (False, True)),
    Decode("decode batch 1", 1, 3.49, 2.2),
    Decode("decode batch 16", 16, 3.88, 2.8),
    Decode("decode batch 64", 64, 6.13, 4.2),
    Decode("decode batch 256", 256, 17.28, 10.0),
    Decode("decode batch 64, context 8,192", 64, 8.69, 6.0, context=8192),
)


def floor_ms(work: Prefill | Decode, config: ModelConfig) -> float:
    """The least milliseconds that the chip needs: FLOPs over the matrix rate, or bytes over the copy rate.

    In a prefill every weight meets every token; a decode step reads every weight, state and cached token once and
    writes every state once, in bfloat16. Attention and launch gaps are left out: a bound, not a plan.
    """
    weights = num_weights(config)
    layout = config.cache_layout("", "bfloat16", BLOCK_SIZE, "bfloat16")
    context = work.num_cached if isinstance(work, Prefill) else work.context
    cached_bytes = 2 * layout.state_bytes + context * layout.block_bytes / BLOCK_SIZE
    moving_ms = 1e3 * (2 * weights + work.num_sequences * cached_bytes) / BYTES_A_SECOND
    return max(moving_ms, 2e3 * weights * work.num_rows / FLOPS_A_SECOND)


def reach_ms(work: Prefill | Decode, config: ModelConfig) -> float | None:
    """The anchor's target; for another shape the same multiple of the floor."""
    if work.reach_ms is None:
        return None
    return work.reach_ms * floor_ms(work, config) / floor_ms(work, GRANITE_H_MICRO)


@dataclass(frozen=True)
class Result:
    work: Prefill | Decode
    ms: float  # of the whole prefill, or of one decode step
    host_ms: float  # to launch that


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
        for pool in memory.pools:  # decodes start from states that no pass computed
            pool.normal_(0, 0.1)
        self.runner, self.launching_runner = ModelRunner(model, memory), ModelRunner(model, memory)
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
        """`DECODE_STEPS` steps; the host's median milliseconds to launch one."""
        draws = [(row, GREEDY) for row in range(work.num_sequences)]
        blocks = [_blocks_of(sequence, work) for sequence in range(work.num_sequences)]
        before: Launched | None = None
        taken = []
        for n in range(DECODE_STEPS):
            started_s = time.perf_counter()
            steps = [
                SequenceInput((1,), work.context + n, blocks[i], i, i, future_token=None if before is None else i)
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
    if not launched.logits.isfinite().all():
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


def print_table(name: str, config: ModelConfig, results: Sequence[Result]) -> None:
    beside = "" if name == "granite-h-micro" else " (of granite-h-micro)"
    vllm = f"vLLM 0.26 ms{beside}"
    print()
    print(table_header(name, "ms", "tokens/s", vllm, "floor ms", "x floor", "to reach ms", "", "host ms"))
    for result in results:
        work, floor, reach = result.work, floor_ms(result.work, config), reach_ms(result.work, config)
        rate, times_floor = f"{1e3 * work.num_rows / result.ms:,.0f}", f"{result.ms / floor:.2f}"
        met = verdict(None if reach is None else result.ms <= reach)
        ours = _ms(result.ms), rate, _ms(work.vllm_ms), _ms(floor), times_floor
        print(table_row(work.name, *ours, _ms(reach), met, _ms(result.host_ms)))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def shrunk(config: ModelConfig) -> ModelConfig:
    """Four layers of one hidden unit in sixteen: to try this file where there is no GPU."""
    layers = (config.layers[0], config.layers[5 if config.layers[5].mixer == "attention" else 3]) * 2
    return replace(config, vocab_size=1024, hidden_size=128, intermediate_size=256, layers=layers)


def shrunk_works(works: Sequence[Prefill | Decode]) -> list[Prefill | Decode]:
    """Works of a thirty-second of the tokens, without the prefills of several prompts."""
    return [_shrunk_work(work) for work in works if work.num_sequences == 1 or isinstance(work, Decode)]


def _shrunk_work(work: Prefill | Decode) -> Prefill | Decode:
    if isinstance(work, Decode):
        return replace(work, num_sequences=min(work.num_sequences, 4), context=work.context // 32)
    num_cached = work.num_cached // 32 // BLOCK_SIZE * BLOCK_SIZE
    return replace(work, num_tokens=work.num_tokens // 32, num_cached=num_cached)


def main(
    shape: list[str] = ["granite-h-micro", "qwen35-4b"],  # noqa: B006
    device: str = "cuda",
    only: Annotated[str, typer.Option(help="rows whose name has this in it")] = "",
    chunk: Annotated[int, typer.Option(help="tokens a prefill step")] = 8192,
    rounds: int = 5,
    graphs: bool = True,
    profile_to: Annotated[Path | None, typer.Option("--profile", help="write where each row's time goes here")] = None,
    quantization: Annotated[str | None, typer.Option(help="fp8; floors stay those of bf16")] = None,
    shrink: Annotated[bool, typer.Option("--shrink", help="tiny shapes and works: a trial of this file")] = False,
) -> None:
    """Prefill and decode on a GPU beside vLLM and the chip's floor."""
    works = [work for work in (shrunk_works(WORKS) if shrink else WORKS) if only in work.name]
    for name in shape:
        config = shrunk(SHAPES[name]) if shrink else SHAPES[name]
        bench = Bench(config, works, device, rounds, chunk, graphs and device != "cpu", quantization)
        print(f"\n{name}: weights, memory and graphs after {bench.load_s:.1f} s", flush=True)
        results = []
        for work in works:
            results.append(bench.run(work))
            print(f"  {work.name}: {results[-1].ms:.2f} ms", flush=True)
            if profile_to is not None:
                with profile_to.open("a") as file:
                    file.write(f"## {name}: {work.name}\n\n{bench.profiled(work)}\n\n")
        print_table(name, config, results)
        del bench  # before the next shape's weights are made
