"""Times of GPU kernels beside what the chip allows, as rows of a Markdown table."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

FLOPS_A_SECOND, BYTES_A_SECOND = 790e12, 4.3e12  # bf16 products and copies, measured on an H200
CACHE_BYTES = 256 << 20  # several times an H200's L2
MOST_COPIES = 32
GRAPH_US = 20_000  # of work in a graph, unless one run is longer
HEADER = "| kernel | shape | work | us | floor us | of floor |\n|---|---|---|---|---|---|"


class Row(NamedTuple):
    """Bytes and FLOPs are those that the work cannot do without; the floor is that of whichever take longer."""

    kernel: str
    shape: str
    time_us: float
    num_bytes: float
    flops: float = 0.0

    @property
    def floor_us(self) -> float:
        return max(self.num_bytes / BYTES_A_SECOND, self.flops / FLOPS_A_SECOND) * 1e6

    @property
    def work(self) -> str:
        """What the floor is of."""
        if self.flops / FLOPS_A_SECOND > self.num_bytes / BYTES_A_SECOND:
            return f"{self.flops / 1e9:,.1f} GFLOP"
        return f"{self.num_bytes / 2**20:,.2f} MiB"

    def __str__(self) -> str:
        share = self.floor_us / self.time_us
        times = f"{self.time_us:.1f} | {self.floor_us:.1f} | {share:.0%}"
        return f"| {self.kernel} | {self.shape} | {self.work} | {times} |"


def measure(
    kernel: str, shape: str, prepare: Callable[[], Callable[[], object]], num_bytes: float, flops: float = 0.0
) -> Row:
    """Time what `prepare` returns, over as many of its inputs as overflow the cache.

    A variant that does not fit the chip gives a row whose time is NaN.
    """
    try:
        took = time_us([prepare() for _ in range(min(MOST_COPIES, int(CACHE_BYTES // max(num_bytes, 1)) + 1))])
    except (triton.runtime.errors.OutOfResources, torch.OutOfMemoryError) as error:  # a fault is no slow variant
        print(f"{kernel}, {shape}: {error}")
        took = float("nan")
    return Row(kernel, shape, took, num_bytes, flops)


def time_us(runs: list[Callable[[], object]]) -> float:
    """Median over replays of one CUDA graph that holds every run, in turn."""
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
