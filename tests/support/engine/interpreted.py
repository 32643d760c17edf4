"""Captured passes of whole models on a CPU: Triton's interpreter for the device, a rerun for a replay.

All memory that nobody wrote is NaN.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from headrace.engine.graphs import Capture, Captured
from headrace.engine.runner import ModelRunner
from headrace.forward.sequence_input import SequenceInput

BLOCKS_EACH, MOST_ROWS = 4, 16


@contextmanager
def triton_on_the_cpu() -> Iterator[None]:
    """All operations go to their Triton kernels, which tests/conftest.py has put into the interpreter."""
    kernels = [module for name, module in sys.modules.items() if name.startswith("headrace.kernels.")]
    with pytest.MonkeyPatch.context() as patch:
        for module in kernels:
            if hasattr(module, "runs_triton"):
                patch.setattr(module, "runs_triton", lambda x: True)
        yield


def in_triton(work: Callable[[], Tensor]) -> Captured:
    """As a graph replays: the work again on what its inputs hold, its result in the same place."""

    def run() -> Tensor:
        with triton_on_the_cpu():
            return work()

    logits = run().clone()
    return Captured(lambda: logits.copy_(run()), logits)


def blocks_of(sequence: int) -> list[int]:
    """In no order."""
    return [(5 * block + 3) % BLOCKS_EACH + BLOCKS_EACH * sequence for block in range(BLOCKS_EACH)]


def step(sequence: int, prompt: list[int], start: int, end: int, src: int | None, dst: int, **more) -> SequenceInput:
    return SequenceInput(prompt[start:end], start, blocks_of(sequence), src, dst, **more)


def forget_all(runner: ModelRunner) -> None:
    """Fills its memory with NaN."""
    for part in (*runner.memory.pools, *(part for tail in runner.memory.tails for part in tail.parts)):
        part.fill_(float("nan"))


def assert_same_memory(ours: ModelRunner, theirs: ModelRunner) -> None:
    for mine, other in zip(ours.memory.pools, theirs.memory.pools, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-3, equal_nan=True)


def once_needed(work: Callable[[], Tensor]) -> Captured:
    """Nothing runs before the first replay, and what it finds lies in the inputs of the next one."""

    def replay() -> None:
        with triton_on_the_cpu():
            work()

    return Captured(replay, torch.empty(0))


def replayed_checks(vocab_size: int) -> Capture:
    """As `in_triton`, of passes that check or make drafts, but nothing runs before the first replay."""
    logits = torch.empty(MOST_ROWS, vocab_size)

    def capture(work: Callable[[], Tensor]) -> Captured:
        def replay() -> None:
            with triton_on_the_cpu():
                found = work()
            if found.dim() == 2:
                logits[: len(found)] = found

        return Captured(replay, logits)

    return capture


def capture_layer(runner: ModelRunner, max_sequences: int, max_tokens: int) -> None:
    """Captures the layer's passes alone: checks are launched, with the values of their drafts."""
    runner.capture_checks(max_sequences, 3, max_tokens, once_needed)
    runner._graphs.checks = ()
