"""CUDA graphs of steps, captured for a few numbers of rows; a step is padded to the next of these.

A step of few rows is hundreds of launches of microseconds each; replayed as one graph it costs the host one launch.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Launching a prefill takes the host of an H200 18 to 38 ms, a mixture of experts 50 to 105; beside an event loop more.
# A row more, or one of padding, is 10 us of the device, and capturing a size 50 ms. Chunks that a step's time bounds
# have any number of blocks: up to 1,024 rows 7 % of a pass are padding, and with nine sizes instead of fourteen it was
# 14 %. Steps of prompts alone are as long as a node's budget allows, so that most are just below 4,096 rows.
PREFILL_ROWS = (
    16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048,
    2304, 2560, 2816, 3072, 3328, 3584, 3712, 3840, 3968, 4096,
)  # fmt: skip
# Steps that nearly fill the longest pass are replays, too; others would pay more for its padding than they save.
LONGEST_PASS_ROWS, NEARLY_FULL = 8192, 7 / 8
# A chunk of 384 to 1,024 rows in one pass with the decodes before it takes an H100 1 to 2.5 ms less than in one of its
# own, which reads the weights again; a longer one nothing. Many rows of padding would cost as much: attention splits
# contexts for all of them.
MIXED_DECODES, MOST_MIXED_ROWS = (16, 32, 48, 64), 1024
# All sizes of chunks would make 112 mixed passes with checks for 64 sequences, and 5.6 s of a start; these ten make 80.
# A chunk has at most 64 rows of padding more than in a pass of its own: 0.6 ms, where reading the weights again takes
# an H200 2.7. Sequences have at most the four rows that three drafts need.
MIXED_CHECK_ROWS, MOST_MIXED_EACH = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024), 4
# Logits of so many rows take half a gigabyte with a vocabulary of a quarter of a million.
MOST_CHECKED_ROWS = 512


@dataclass(frozen=True)
class Captured:
    """Captured work: a replay reads its input tensors' present contents, and writes the logits to the same address.

    logits   of the model's head, not divided: `Logits.rows`
    """

    replay: Callable[[], object]
    logits: Tensor


Capture = Callable[[Callable[[], Tensor]], Captured]


class Inputs(Protocol):
    """The inputs of captured passes: tensors at fixed addresses."""

    def num_rows(self, inputs: Sequence[SequenceInput]) -> int:
        """Rows of a pass of these inputs, without padding up to a captured number."""
        ...

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
        self.inputs = inputs
        self.sizes = sorted(sizes)
        self._graphs: dict[int, Captured] = {}
        for size in reversed(self.sizes):  # the largest first: smaller ones fit into its memory
            self._graphs[size] = capture(partial(self._forward, forward, size))

    def fits(self, inputs: Sequence[SequenceInput]) -> bool:
        num_rows = self.inputs.num_rows(inputs)
        if not 0 < num_rows <= self.sizes[-1]:
            return False
        size = self._size_for(num_rows)
        is_worth_it = size <= PREFILL_ROWS[-1] or num_rows >= NEARLY_FULL * size
        return is_worth_it and self.inputs.fits(inputs)

    def run(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """Logits [sum of num_logits, V], which the next `run` overwrites. Caches advance; nothing is waited for."""
        size = self._size_for(self.inputs.num_rows(inputs))
        self.inputs.load(inputs, size)
        self._graphs[size].replay()
        return self._graphs[size].logits[: sum(entry.num_logits for entry in inputs)]

    def _size_for(self, num_rows: int) -> int:
        return next(size for size in self.sizes if size >= num_rows)

    def _forward(self, forward: Callable[[ForwardBatch], Tensor], size: int) -> Tensor:
        return forward(self.inputs.batch(size))


@dataclass(frozen=True)
class Replayed:
    """A replayed step.

    logits     [sum of num_logits, V], not divided, which the next one may overwrite
    is_drawn   the passes have drawn each row's best token themselves: row i's is draw i
    """

    logits: Tensor
    is_drawn: bool


@dataclass
class StepGraphs:
    """The captured passes of a node: of single tokens, with drafts or without, of longer chunks, and of both in one.

    One replay computes a step's single tokens and as many of its longer chunks as fit into the same pass; others
    take further replays. Each replay reads the weights anew, which still takes less time than launching the whole step
    as one pass that was not captured. So a step is replayed whatever the number and the mix of its sequences, unless a
    part of it fits no pass. If any single token has drafts or stands behind a check, all single tokens of the step are
    rows of a check.
    """

    block_size: int
    decodes: CapturedPasses | None = None
    prefills: CapturedPasses | None = None
    mixes: tuple[CapturedPasses, ...] = ()  # those of fewer decode rows first
    checks: tuple[CapturedPasses, ...] = ()  # of single tokens with drafts; those of fewer drafts first
    mixed_checks: tuple[CapturedPasses, ...] = ()  # those of fewer drafts first, and of these those of fewer sequences

    def run(self, inputs: Sequence[SequenceInput]) -> Replayed | None:
        """Replays a step; None: such a step was not captured."""
        replays = self._replays(inputs)
        if not replays:
            return None
        check_inputs(inputs, self.block_size)
        logits: list[Tensor] = []
        for n, (passes, some) in enumerate(replays):
            part = passes.run([inputs[i] for i in some])
            is_last = n == len(replays) - 1
            logits.append(part if is_last else part.clone())  # the next replay may overwrite it
        drawing = [i for _, some in replays for i in some if inputs[i].num_logits]
        joined = logits[0] if len(logits) == 1 else torch.cat(logits)
        if drawing != sorted(drawing):
            order = [i for i in drawing for _ in range(inputs[i].num_logits)]
            by_input = sorted(range(len(order)), key=order.__getitem__)
            return Replayed(joined.index_select(0, upload_values(by_input, joined.device)), is_drawn=False)
        return Replayed(joined, is_drawn=len(replays) == 1 and replays[0][0] is not self.prefills)

    def _replays(self, inputs: Sequence[SequenceInput]) -> list[tuple[CapturedPasses, list[int]]]:
        """The passes to replay, in order, each with the indices of its inputs; none if that does not cover the step.

        Of a pass, single tokens come first, and among them and among the longer chunks those with logits.
        """
        by_need = sorted(range(len(inputs)), key=[not entry.num_logits for entry in inputs].__getitem__)
        is_single = [entry.is_decode or entry.has_drafts for entry in inputs]
        single = [i for i in by_need if is_single[i]]
        longer = [i for i in by_need if not is_single[i]]
        groups = _groups(self.prefills, inputs, longer)
        replays = [(_fitting((self.prefills,), inputs, group), group) for group in groups]
        if single:
            # All at once: they read the tokens of the launch before, which the pass replaces by its own.
            is_check = any(inputs[i].has_drafts or inputs[i].behind is not None for i in single)
            apart, mixes = (self.checks, self.mixed_checks) if is_check else ((self.decodes,), self.mixes)
            both = [*single, *replays[0][1]] if replays else single
            mix = _fitting(mixes, inputs, both) if replays else None
            if mix is None:
                replays.insert(0, (_fitting(apart, inputs, single), single))
            else:
                replays[0] = mix, both
        covering = [(passes, some) for passes, some in replays if passes is not None]
        return covering if len(covering) == len(replays) else []


def _fitting(
    passes: Iterable[CapturedPasses | None], inputs: Sequence[SequenceInput], some: Sequence[int]
) -> CapturedPasses | None:
    """The first of the passes that takes the inputs with the indices `some`."""
    entries = [inputs[i] for i in some]
    return next((each for each in passes if each is not None and each.fits(entries)), None)


def _groups(passes: CapturedPasses | None, inputs: Sequence[SequenceInput], some: Sequence[int]) -> list[list[int]]:
    """The indices `some` in groups, each as large as a pass takes, or of one input that none takes."""
    groups: list[list[int]] = []
    for i in some:
        if groups and passes is not None and passes.fits([inputs[j] for j in (*groups[-1], i)]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def sizes_up_to(max_rows: int, sizes: Sequence[int]) -> list[int]:
    """The sizes to capture for steps of at most `max_rows` rows: up to the first that holds them, or all."""
    within = [size for size in sizes if size < max_rows]
    return within + [size for size in sizes if size >= max_rows][:1]


def checked_sizes(max_sequences: int, max_drafts: int) -> dict[int, list[int]]:
    """Rows of passes to capture that check up to `max_drafts` drafts of each of a few numbers of sequences.

    By rows of each sequence: 2, 4, 8 and the most that there may be.
    """
    most = min(max_drafts + 1, MOST_CHECKED_ROWS)
    rows_each = [rows for rows in (2, 4, 8) if rows < most] + [most]
    counts = sizes_up_to(max_sequences, BATCH_SIZES)
    return {rows: [rows * count for count in counts if rows * count <= MOST_CHECKED_ROWS] for rows in rows_each}


def mixed_counts(max_sequences: int) -> list[int]:
    """Numbers of sequences of passes to capture that decode or check these, and compute a chunk."""
    return [*(count for count in MIXED_DECODES if count < max_sequences), max_sequences]


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
