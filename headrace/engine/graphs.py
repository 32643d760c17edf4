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
from headrace.kernels.lib.upload import upload_values

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
    """The captured passes of a node: a step's single tokens are one replay, and its longer chunks another, or several.

    Each replay reads the weights anew, which takes less time than launching a step's passes together. So whatever the
    number and the mix of a step's sequences, all of it is replayed, unless one chunk alone does not fit.
    """

    block_size: int
    decodes: CapturedPasses | None = None
    prefills: CapturedPasses | None = None

    def run(self, inputs: Sequence[SequenceInput]) -> Tensor | None:
        """Logits [sum of num_logits, V], which the next `run` may overwrite; None: such a step was not captured."""
        replays = self._replays(inputs)
        if not replays:
            return None
        check_inputs(inputs, self.block_size)
        logits: list[Tensor] = []
        for n, (passes, some) in enumerate(replays):
            part = passes.run([inputs[i] for i in some])
            is_overwritten = any(later is passes for later, _ in replays[n + 1 :])
            logits.append(part.clone() if is_overwritten else part)
        if len(logits) == 1:
            return logits[0]
        order = [i for _, some in replays for i in some if inputs[i].num_logits]
        return _in_order(torch.cat(logits), order)

    def _replays(self, inputs: Sequence[SequenceInput]) -> list[tuple[CapturedPasses, list[int]]]:
        """The passes to replay, in order, each with the indices of its inputs; none if that does not cover the step.

        Of a pass, the inputs with logits come first.
        """
        by_need = sorted(range(len(inputs)), key=lambda i: not inputs[i].num_logits)
        single = [i for i in by_need if inputs[i].is_decode]
        longer = [i for i in by_need if not inputs[i].is_decode]
        replays: list[tuple[CapturedPasses, list[int]]] = []
        # All decodes at once: they read the tokens of the launch before, which the pass replaces by its own.
        for passes, groups in ((self.decodes, [single]), (self.prefills, _groups(self.prefills, inputs, longer))):
            for some in filter(None, groups):
                if passes is None or not passes.fits([inputs[i] for i in some]):
                    return []
                replays.append((passes, some))
        return replays


def _groups(passes: CapturedPasses | None, inputs: Sequence[SequenceInput], some: Sequence[int]) -> list[list[int]]:
    """The indices `some` in groups, each as large as a pass takes, or of one input that none takes."""
    groups: list[list[int]] = [[]]
    for i in some:
        if groups[-1] and (passes is None or not passes.fits([inputs[j] for j in (*groups[-1], i)])):
            groups.append([])
        groups[-1].append(i)
    return groups


def _in_order(logits: Tensor, order: Sequence[int]) -> Tensor:
    """The rows of logits by ascending `order`."""
    by_order = sorted(range(len(order)), key=order.__getitem__)
    if by_order == list(range(len(order))):
        return logits
    return logits.index_select(0, upload_values(by_order, logits.device))


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
