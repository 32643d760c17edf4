"""Times of host work and of GPU kernels, beside the chip's limits, and the rows of Markdown tables."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Annotated, NamedTuple

import torch
import triton
import typer
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg
from torch.profiler import ProfilerActivity

FLOPS_A_SECOND, BYTES_A_SECOND = 790e12, 4.3e12  # bf16 products and copies, measured on an H200
FP8_FLOPS_A_SECOND = 1550e12  # sustained, as issue 18 has it; products reach 1,300 to 1,450 (docs/gpu-notes.md, 21)
CACHE_BYTES = 256 << 20  # several times an H200's L2
MOST_COPIES = 32
GRAPH_US = 20_000  # of work in a graph, unless one run is longer
MOST_KERNELS = 30


def table_row(*cells: object) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_header(*titles: str) -> str:
    return f"{table_row(*titles)}\n|{'---|' * len(titles)}"


def verdict(met: bool | None) -> str:
    """A table's word for a target; nothing where none was asked."""
    return {None: "", True: "met", False: "missed"}[met]


def best_s(work: Callable[[], object], repeats: int, calls: int = 1) -> float:
    """Seconds of one call: the quickest of `repeats` loops of `calls`, which other processes disturb least."""
    loops = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        for _ in range(calls):
            work()
        loops.append((time.perf_counter() - began_s) / calls)
    return min(loops)


class Comparison(NamedTuple):
    """Best seconds of two works, and the median over rounds of second / first: above 1, the first is quicker."""

    first_s: float
    second_s: float
    ratio: float


def compare(first: Callable[[int], float], second: Callable[[int], float], rounds: int) -> Comparison:
    """Seconds of two works in alternating rounds, so that a busy machine slows both; one more round warms them up.

    Both are called with the round's number. The one that goes second finds warmer caches: each does so in turn.
    """
    times = []
    for number in range(rounds + 1):
        taken = {work: work(number) for work in ((first, second) if number % 2 else (second, first))}
        times.append((taken[first], taken[second]))
    times = times[1:]
    ratio = statistics.median(second_s / first_s for first_s, second_s in times)
    return Comparison(min(first_s for first_s, _ in times), min(second_s for _, second_s in times), ratio)


HEADER = table_header("kernel", "shape", "work", "us", "floor us", "of floor")


class Row(NamedTuple):
    """A kernel's time. Bytes and FLOPs are the least it can do with; the floor is whichever of them takes longer."""

    kernel: str
    shape: str
    time_us: float
    num_bytes: float
    flops: float = 0.0

    @property
    def floor_us(self) -> float:
        return max(self.num_bytes / BYTES_A_SECOND, self.flops / FLOPS_A_SECOND) * 1e6

    def __str__(self) -> str:
        is_compute = self.flops / FLOPS_A_SECOND > self.num_bytes / BYTES_A_SECOND
        work = f"{self.flops / 1e9:,.1f} GFLOP" if is_compute else f"{self.num_bytes / 2**20:,.2f} MiB"
        times = f"{self.time_us:.1f}", f"{self.floor_us:.1f}", f"{self.floor_us / self.time_us:.0%}"
        return table_row(self.kernel, self.shape, work, *times)


def measure(
    kernel: str, shape: str, prepare: Callable[[], Callable[[], object]], num_bytes: float, flops: float = 0.0
) -> Row:
    """Times what `prepare` returns, over as many inputs as overflow the cache; NaN if it does not fit the chip."""
    try:
        took = time_us([prepare() for _ in range(min(MOST_COPIES, int(CACHE_BYTES // max(num_bytes, 1)) + 1))])
    except (triton.runtime.errors.OutOfResources, torch.OutOfMemoryError) as error:  # any other error is a fault
        print(f"{kernel}, {shape}: {error}")
        took = float("nan")
    return Row(kernel, shape, took, num_bytes, flops)


def time_us(runs: list[Callable[[], object]]) -> float:
    """Median microseconds of one run, over replays of a CUDA graph that holds all of them in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs may still be on their way, index tables among them
    with torch.cuda.stream(stream):
        for run in runs:  # compiles and allocates outside the graph
            run()
        once_us = _elapsed_us(runs[0], stream)
    rounds = -(-max(1, min(20, int(GRAPH_US / once_us))) // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for run in runs:
                run()
    with torch.cuda.stream(stream):
        graph.replay()
        times = [_elapsed_us(graph.replay, stream) for _ in range(9)]
    return statistics.median(times) / (rounds * len(runs))


def _elapsed_us(run: Callable[[], object], stream: torch.cuda.Stream) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def profile(work: Callable[[], object]) -> str:
    """A Markdown table of the kernels that take longest, for one run of `work` after one without the profiler."""
    on_device = torch.cuda.is_available()
    work()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]) as run:
        work()
        if on_device:
            torch.cuda.synchronize()
    # An operator's row repeats the time of the kernels that it launched: with both, each would count twice.
    spent = [
        (event.self_device_time_total if on_device else event.self_cpu_time_total, event.count, event.key)
        for event in run.key_averages()
        if not on_device or _is_on_device(event)
    ]
    total_us = sum(us for us, _, _ in spent) or 1
    gaps = f", {gaps_us(run.events()) / 1e3:.2f} ms of gaps between" if on_device else ""
    lines = [f"{total_us / 1e3:.2f} ms on the device{gaps}", "", table_header("share", "ms", "calls", "kernel")]
    for us, count, name in sorted(spent, reverse=True)[:MOST_KERNELS]:
        lines.append(table_row(f"{us / total_us:.1%}", f"{us / 1e3:.3f}", count, name[:100].replace("|", "/")))
    return "\n".join(lines)


def gaps_us(events: Iterable[FunctionEvent]) -> float:
    """Microseconds in which the device had nothing to do, between the first of its events and the last."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in events if _is_on_device(event))
    ends = accumulate((end for _, end in spans), max)
    return sum(max(0.0, begin - end) for (begin, _), end in zip(spans[1:], ends, strict=False))


def _is_on_device(event: FunctionEvent | FunctionEventAvg) -> bool:
    return "cuda" in str(event.device_type).lower()


def kernel_command(kinds: Mapping[str, Callable[[], Iterable[Row]]], subject: str) -> Callable[..., None]:
    """A command that prints the rows of `kinds`."""

    @torch.no_grad()
    def main(
        only: Annotated[list[str], typer.Option(help=f"any of {', '.join(kinds)}")] = [*kinds],  # noqa: B006
    ) -> None:
        print(HEADER)
        for kind in only:
            for row in kinds[kind]():
                print(row, flush=True)

    main.__doc__ = subject
    return main
