"""CUDA graphs of decode steps: a few batch sizes, captured once; a step is padded to the next of them.

A step of a small batch is hundreds of launches of microseconds each; replayed as one graph it costs the host one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.batch import SequenceStep
from engine.decode_inputs import DecodeInputs
from engine.step_plan import StepPlan
from kernels.argmax import argmax

log = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Captured:
    """Work that runs again on what its input tensors hold by then; its logits stand in the same place each time."""

    replay: Callable[[], object]
    logits: Tensor


Capture = Callable[[Callable[[], Tensor]], Captured]


class DecodeGraphs:
    """One captured forward pass with greedy draws for each batch size."""

    def __init__(
        self,
        forward: Callable[[StepPlan], Tensor],
        inputs: DecodeInputs,
        drawn: Tensor,
        sizes: Sequence[int],
        capture: Capture,
    ):
        """`forward` gives logits [B, V]. `drawn` int64: the best token of row i goes to place i."""
        self._inputs = inputs
        self._sizes = sorted(sizes)
        self._graphs: dict[int, Captured] = {}

        def decode(num_rows: int) -> Tensor:
            logits = forward(inputs.plan(num_rows))
            argmax(logits, drawn[:num_rows])
            return logits

        started_s = time.monotonic()
        for i, size in enumerate(reversed(self._sizes)):  # the largest first: smaller ones find room in its memory
            self._graphs[size] = capture(partial(decode, size))
            elapsed_s = time.monotonic() - started_s
            log.info("decode graph %d of %d: batch %d after %.1f s", i + 1, len(self._sizes), size, elapsed_s)

    def fits(self, steps: Sequence[SequenceStep]) -> bool:
        """Whether `run` takes them: one token and one row of logits each, not too many, none too long."""
        if not 0 < len(steps) <= self._sizes[-1]:
            return False
        return all(
            len(step.tokens) == step.num_logits == 1 and len(step.block_ids) <= self._inputs.max_blocks
            for step in steps
        )

    def run(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Logits [len(steps), V], which the next `run` overwrites. Caches advance; nothing is waited for."""
        size = next(size for size in self._sizes if size >= len(steps))
        self._inputs.load(steps, size)
        self._graphs[size].replay()
        return self._graphs[size].logits[: len(steps)]


def sizes_up_to(max_rows: int) -> list[int]:
    """The batch sizes to capture for steps of at most so many sequences."""
    within = [size for size in BATCH_SIZES if size < max_rows]
    return within + [size for size in BATCH_SIZES if size >= max_rows][:1]


class CudaCapture:
    """Captures on the current device. All graphs share one memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
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
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = work()
        return Captured(graph.replay, logits)
