"""Captured passes of whole models on a CPU: Triton's interpreter or torch for the device, a rerun for a replay.

All memory that nobody wrote is NaN.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor

from headrace.engine.graphs import Capture, Captured
from headrace.engine.runner import ModelRunner
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.attention import paged_attention
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.output_gate import gate_output_torch
from headrace.kernels.attention.paged_attention import DenseContexts
from headrace.kernels.lib.sizes import cdiv

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


def replayed_checks(vocab_size: int, forms: Callable[[], AbstractContextManager[None]] = triton_on_the_cpu) -> Capture:
    """As `in_triton`, of passes that check or make drafts, but nothing runs before the first replay.

    forms   `attention_in_torch`: as `in_torch`
    """
    logits = torch.empty(MOST_ROWS, vocab_size)

    def capture(work: Callable[[], Tensor]) -> Captured:
        def replay() -> None:
            with forms():
                found = work()
            if found.dim() == 2:
                logits[: len(found)] = found

        return Captured(replay, logits)

    return capture


def in_torch(work: Callable[[], Tensor]) -> Captured:
    """As `once_needed`, by torch's forms, a hundred times as fast: for tests of what goes around the passes."""

    def replay() -> None:
        with attention_in_torch():
            work()

    return Captured(replay, torch.empty(0))


@contextmanager
def attention_in_torch() -> Iterator[None]:
    """Attention over the contexts of captured passes runs in torch; all else does so on a CPU anyway."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "paged_decode_triton", _paged_decode_in_torch)
        yield


def _paged_decode_in_torch(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    contexts: PagedContexts,
    gate: Tensor | None = None,
    skip_first: bool = False,
) -> Tensor:
    """Rows that see nothing are zeros, as in Triton."""
    lens, first = contexts.lens_R.tolist(), int(skip_first)
    seeing = [row for row, length in enumerate(lens) if length > first]
    out = torch.zeros_like(q)
    if seeing:
        size = k_pool.shape[1]
        blocks = [contexts.table_NM[row // contexts.rows_each, : cdiv(lens[row], size)].tolist() for row in seeing]
        dense = DenseContexts.build([lens[row] for row in seeing], blocks, size, q.device)
        out[seeing] = paged_attention.paged_decode_torch(q[seeing], k_pool, v_pool, scale, dense, skip_first)
    return out if gate is None else gate_output_torch(out, gate)


def capture_layer(runner: ModelRunner, max_sequences: int, max_tokens: int, capture: Capture = in_torch) -> None:
    """Captures the layer's passes alone: checks are launched, with the values of their drafts."""
    runner.capture_checks(max_sequences, 3, max_tokens, capture)
    runner._graphs.checks = ()
