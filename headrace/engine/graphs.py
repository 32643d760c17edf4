"""CUDA graphs of steps, captured for a few numbers of rows; a step is padded to the next of these.

A step of few rows is hundreds of launches of microseconds each; replayed as one graph it costs the host one launch.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from headrace.forward.forward_batch import ForwardBatch, check_inputs
from headrace.forward.sequence_input import SequenceInput

log = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Launching a prefill takes the host of an H200 18 to 38 ms, which its device needs for two thousand rows; a row more,
# or one of padding, is 10 us of the device, and capturing a size 50 ms.
PREFILL_ROWS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)


@dataclass(frozen=True)
class Captured:
    """Captured work: a replay reads its input tensors' present contents, and writes the logits to the same address."""

    replay: Callable[[], object]
    logits: Tensor


Capture = Callable[[Callable[[], Tensor]], Captured]


class Inputs(Protocol):
    """The inputs of captured passes: tensors at fixed addresses."""

    def fits(self, inputs: Sequence[SequenceInput]) -> bool:
        """True if `load` takes them; the number of rows is checked elsewhere."""
        ...

    def load(self, inputs: Sequence[SequenceInput], num_rows: int) -> None:
        """Loads the rows of these inputs, padded to `num_rows`."""
        ...

    def batch(self, num_rows: int) -> ForwardBatch:
        """The loaded rows as a batch."""
        ...


class CapturedPasses:
    """One captured forward pass for each of a few numbers of rows."""

    def __init__(
        self, forward: Callable[[ForwardBatch], Tensor], inputs: Inputs, sizes: Sequence[int], capture: Capture
    ):
        """`forward` gives logits [num_rows or fewer, V], first those of the inputs that were loaded."""
        self._inputs = inputs
        self._sizes = sorted(sizes)
        self._graphs: dict[int, Captured] = {}
        for size in reversed(self._sizes):  # the largest first: smaller ones fit into its memory
            self._graphs[size] = capture(partial(self._forward, forward, size))

    def fits(self, inputs: Sequence[SequenceInput]) -> bool:
        return 0 < _num_rows(inputs) <= self._sizes[-1] and self._inputs.fits(inputs)

    def run(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """Logits [sum of num_logits, V], which the next `run` overwrites. Caches advance; nothing is waited for."""
        size = next(size for size in self._sizes if size >= _num_rows(inputs))
        self._inputs.load(inputs, size)
        self._graphs[size].replay()
        return self._graphs[size].logits[: sum(entry.num_logits for entry in inputs)]

    def _forward(self, forward: Callable[[ForwardBatch], Tensor], size: int) -> Tensor:
        return forward(self._inputs.batch(size))


@dataclass
class StepGraphs:
    """The captured passes of a node: a step's decodes are one replay, and the short prefills behind them another.

    The weights are then read twice, which takes less time than launching the two together.
    """

    block_size: int
    decodes: CapturedPasses | None = None
    prefills: CapturedPasses | None = None

    def run(self, inputs: Sequence[SequenceInput]) -> Tensor | None:
        """Logits [sum of num_logits, V], which the next `run` may overwrite; None: such a step was not captured."""
        num_decodes = next((i for i, entry in enumerate(inputs) if not entry.is_decode), len(inputs))
        replays: list[Callable[[], Tensor]] = []
        for passes, some in ((self.decodes, inputs[:num_decodes]), (self.prefills, inputs[num_decodes:])):
            if some and (passes is None or not passes.fits(some)):
                return None
            if some and passes is not None:
                replays.append(partial(passes.run, some))
        if not replays:
            return None
        check_inputs(inputs, self.block_size)
        logits = [replay() for replay in replays]
        return logits[0] if len(logits) == 1 else torch.cat(logits)


def sizes_up_to(max_rows: int, sizes: Sequence[int]) -> list[int]:
    """The sizes to capture for steps of at most `max_rows` rows: up to the first that holds them, or all."""
    within = [size for size in sizes if size < max_rows]
    return within + [size for size in sizes if size >= max_rows][:1]


def _num_rows(inputs: Sequence[SequenceInput]) -> int:
    return sum(len(entry.tokens) for entry in inputs)


class CudaCapture:
    """Captures on the current device. Its graphs share one memory pool: only one of them runs at a time."""

    def __init__(self, what: str, num_graphs: int) -> None:
        """`what` and `num_graphs` are for the log of its progress."""
        self._what, self._num_graphs = what, num_graphs
        self._num_captured = 0
        self._started_s = time.monotonic()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        # Once before, so that kernels are compiled and libraries have their workspaces.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with nothing_collected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = work()
        self._num_captured += 1
        elapsed_s = time.monotonic() - self._started_s
        log.info("%s graph %d of %d after %.1f s", self._what, self._num_captured, self._num_graphs, elapsed_s)
        return Captured(graph.replay, logits)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Disables garbage collection: freeing an old CUDA graph during a capture aborts the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
