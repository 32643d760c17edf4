"""The engine's forward passes on one GPU beside vLLM's times and the chip's floor: prefill and decode, random weights.

    python -m benchmarks gpu-engine [--shape granite-h-micro ...] [--state-dtype bfloat16] [--only batch]
                               [--chunk 2048 4096 8192] [--no-graphs] [--profile FILE] [--device cpu --shrink]

Drives `ModelRunner` as the engine does: prompts in chunks, decode steps one ahead of the host, which reads the
tokens of one step while the next one runs. Times are CUDA events, the median of several rounds after a warm-up;
`host` is what launching a prefill or one decode step costs the host, hidden as long as it stays below the work itself.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu_floors import BLOCK_SIZE, WORKS, Decode, Prefill, floor_ms, reach_ms
from benchmarks.gpu_profile import profile
from benchmarks.shapes import SHAPES
from headrace.engine.runner import Launched, ModelRunner
from headrace.engine.sampler import Draw
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_step import SequenceStep
from headrace.models.config import ModelConfig
from headrace.models.weights import random_model
from headrace.request import Sampling

DECODE_STEPS = 32  # timed together
GREEDY = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), (), 0)


@dataclass(frozen=True)
class Result:
    work: Prefill | Decode
    ms: float  # of the whole prefill, or of one decode step
    host_ms: float  # to launch that


class Bench:
    """One model of a shape, with cache memory for the largest of `works`."""

    def __init__(self, config: ModelConfig, works: Sequence[Prefill | Decode], options: argparse.Namespace):
        self.options = options
        self.device = torch.device(options.device)
        started_s = time.perf_counter()
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        model = random_model(config, dtype, options.device)
        num_blocks = max(work.num_sequences * _blocks(work) for work in works)
        num_slots = max(work.num_sequences + _checkpoints(work) for work in works)
        layout = model.cache_layout(BLOCK_SIZE, options.state_dtype)
        memory = CacheMemory(layout, num_blocks, num_slots, options.device)
        for pool in (memory.kv, memory.conv, memory.rec):  # decodes start from states that nobody computed
            pool.normal_(0, 0.1)
        self.runner, self.launching_runner = ModelRunner(model, memory), ModelRunner(model, memory)
        decodes = [work for work in works if isinstance(work, Decode)]
        if options.graphs and decodes:
            largest = max(work.num_sequences for work in decodes)
            self.runner.capture_decodes(largest, max(_blocks(work) for work in decodes) * BLOCK_SIZE)
        if options.graphs and len(decodes) < len(works):
            longest = max(work.num_tokens for work in works if isinstance(work, Prefill))
            self.runner.capture_prefills(max(options.chunk), longest)
        self._sync()
        self.load_s = time.perf_counter() - started_s

    def run(self, work: Prefill | Decode, chunk: int) -> Result:
        host: list[float] = []
        if isinstance(work, Prefill):
            ms = self._median(lambda: self._time(lambda: host.append(self._prefill(work, chunk))))
            return Result(work, ms, statistics.median(host))
        ms = self._median(lambda: self._time(lambda: host.append(self._decode(work))) / DECODE_STEPS)
        return Result(work, ms, statistics.median(host))

    def profiled(self, work: Prefill | Decode, chunk: int) -> str:
        once = (lambda: self._prefill(work, chunk)) if isinstance(work, Prefill) else (lambda: self._decode(work))
        return profile(once)

    # ------------------------------------------------------------ the work

    def _prefill(self, work: Prefill, chunk: int) -> float:
        """The host's milliseconds to launch it."""
        launched = None
        runner, chunks = self.launching_runner if work.is_launched else self.runner, prefill_steps(work, chunk)
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
                SequenceStep((1,), work.context + n, blocks[i], i, i, feed=None if before is None else i)
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

    # ------------------------------------------------------------ timing

    def _median(self, measure: Callable[[], float]) -> float:
        for _ in range(self.options.warm_up):
            measure()
        return statistics.median(measure() for _ in range(self.options.rounds))

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
    """Times of nonsense are worth nothing."""
    if not launched.logits.isfinite().all():
        raise RuntimeError("the logits are not finite: a kernel is wrong")


def prefill_steps(work: Prefill, chunk: int) -> list[list[SequenceStep]]:
    """The engine's chunks: prompts in order, as many tokens a step as its budget takes."""
    prompt = torch.randint(3, 1000, (work.num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
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
            step.append(SequenceStep(prompt[start:end], start, blocks, src, sequence, emit, num_logits))
            budget -= end - start
            start = end
            if budget == 0:
                chunks.append(step)
                step, budget = [], chunk
    return [*chunks, step] if step else chunks


def _checkpoints(work: Prefill | Decode) -> int:
    return work.num_checkpoints - 1 if isinstance(work, Prefill) else 0


def _blocks(work: Prefill | Decode) -> int:
    num_tokens = work.num_tokens if isinstance(work, Prefill) else work.context + DECODE_STEPS
    return -(-num_tokens // BLOCK_SIZE)


def _blocks_of(sequence: int, work: Prefill | Decode) -> range:
    each = _blocks(work)
    return range(sequence * each, (sequence + 1) * each)


# ---------------------------------------------------------------- the table


def print_table(name: str, config: ModelConfig, results: Sequence[Result]) -> None:
    beside = "" if name.startswith("granite-h-micro") else " (of granite-h-micro)"
    print(f"\n| {name} | ms | tokens/s | vLLM 0.26 ms{beside} | floor ms | x floor | to reach ms | | host ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for result in results:
        work, floor, reach = result.work, floor_ms(result.work, config), reach_ms(result.work, config)
        verdict = "" if reach is None else "met" if result.ms <= reach else "missed"
        print(
            f"| {work.name} | {result.ms:.2f} | {1e3 * work.num_rows / result.ms:,.0f} | {_ms(work.vllm_ms)} "
            f"| {floor:.2f} | {result.ms / floor:.2f} | {_ms(reach)} | {verdict} | {_ms(result.host_ms)} |"
        )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def shrunk(config: ModelConfig) -> ModelConfig:
    """Four layers of one hidden unit in sixteen: to try this file where there is no GPU."""
    layers = (config.layers[0], config.layers[5 if config.layers[5].mixer == "attention" else 3]) * 2
    return replace(config, vocab_size=1024, hidden_size=128, intermediate_size=256, layers=layers)


def shrunk_works(works: Sequence[Prefill | Decode]) -> list[Prefill | Decode]:
    return [
        replace(work, num_tokens=work.num_tokens // 32, num_cached=work.num_cached // 32 // BLOCK_SIZE * BLOCK_SIZE)
        if isinstance(work, Prefill)
        else replace(work, num_sequences=min(work.num_sequences, 4), context=work.context // 32)
        for work in works
        if work.num_sequences == 1 or isinstance(work, Decode)
    ]  # fmt: skip


def prefills(works: Sequence[Prefill | Decode]) -> list[Prefill | Decode]:
    return [work for work in works if isinstance(work, Prefill)]


def measure(bench: Bench, name: str, config: ModelConfig, works: Sequence[Prefill | Decode], chunk: int) -> None:
    """Times the works with prompts in chunks of `chunk` tokens; decodes do not depend on it."""
    print(f"chunks of {chunk}", flush=True)
    results = []
    for work in works:
        results.append(bench.run(work, chunk))
        print(f"  {work.name}: {results[-1].ms:.2f} ms", flush=True)
    print_table(f"{name}, chunks of {chunk}", config, results)
    if bench.options.profile is not None:
        with bench.options.profile.open("a") as file:
            for work in works:
                file.write(f"## {name}: {work.name}, chunks of {chunk}\n\n{bench.profiled(work, chunk)}\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["granite-h-micro", "qwen35-4b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--state-dtype", default=None, help="bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--chunk", type=int, nargs="+", default=[8192], help="tokens a prefill step; several in turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--no-graphs", dest="graphs", action="store_false")
    parser.add_argument("--profile", type=Path, help="write where each row's time goes to this file")
    parser.add_argument("--shrink", action="store_true", help="tiny shapes and works: a trial of this file")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    options.graphs = options.graphs and not on_cpu
    options.state_dtype = options.state_dtype or ("float32" if on_cpu else "bfloat16")
    works = [work for work in (shrunk_works(WORKS) if options.shrink else WORKS) if options.only in work.name]
    for name in options.shape:
        config = shrunk(SHAPES[name]) if options.shrink else SHAPES[name]
        bench = Bench(config, works, options)
        print(f"\n{name}: weights, memory{' and graphs' if options.graphs else ''} after {bench.load_s:.1f} s, "
              f"states in {options.state_dtype}", flush=True)  # fmt: skip
        for chunk in options.chunk:
            measure(bench, name, config, works if chunk == options.chunk[0] else prefills(works), chunk)
        del bench  # before the next shape's weights come


if __name__ == "__main__":
    main()
