"""Captured passes of whole models on a CPU: Triton's interpreter or torch for the device, a rerun for a replay.

All memory that nobody wrote is NaN.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.engine.graphs.captured_passes import Capture, Captured
from headrace.engine.graphs.prefill_inputs import PrefillInputs
from headrace.engine.runner import ModelRunner
from headrace.forward.forward_batch import ForwardBatch, PrefillRows
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.attention import paged_attention
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.output_gate import gate_output_torch
from headrace.kernels.attention.paged_attention import DenseContexts, PagedPrefill
from headrace.kernels.attention.prefill import PagedChunks
from headrace.kernels.lib.captured_segments import CapturedSegments
from headrace.kernels.lib.segments import PrefillSegments, StateWrite
from headrace.kernels.lib.sizes import cdiv

BLOCKS_EACH, MOST_ROWS = 4, 40


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
    """As `in_triton`, of passes with few rows of logits, but nothing runs before the first replay.

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
    """Attention over the contexts of captured passes runs in torch; all else does so on a CPU anyway, if it is told the
    sequences of captured prefills."""
    captured = PrefillInputs.batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "paged_decode_triton", _paged_decode_in_torch)
        patch.setattr(PrefillInputs, "batch", lambda inputs, num_rows: _told(captured(inputs, num_rows), inputs))
        yield


def _told(batch: ForwardBatch, inputs: PrefillInputs) -> ForwardBatch:
    """A captured prefill with its sequences as a plain one has them: those of no rows are none, padding is one more."""
    assert batch.prefill is not None
    captured, chunks = batch.prefill.segments, batch.prefill.attention.chunks
    assert isinstance(captured, CapturedSegments) and isinstance(chunks, PagedChunks)
    parts = zip(*captured._filled, chunks.start_N.tolist(), chunks.table_NM.tolist(), strict=True)
    lengths, sources, writes_of_each, starts, tables = zip(*(part for part in parts if part[0]), strict=True)
    writes = [StateWrite(i, *write) for i, writes in enumerate(writes_of_each) for write in writes]
    segments = PrefillSegments.build(lengths, sources, writes, inputs.device)
    attention = PagedPrefill.build(lengths, starts, tables, inputs._memory.layout.block_size, inputs.device)
    return replace(batch, prefill=PrefillRows(segments, attention))


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


def capture_all(
    runner: ModelRunner,
    max_sequences: int,
    max_step_tokens: int,
    max_tokens: int,
    max_drafts: int = 3,
    forms: Callable[[], AbstractContextManager[None]] = attention_in_torch,
) -> None:
    """Captures all passes of a node that drafts, as `replayed_checks` does."""
    capture = replayed_checks(runner.model.config.vocab_size, forms)
    runner.capture_decodes(max_sequences, max_tokens, capture)
    runner.capture_prefills(max_step_tokens, max_tokens, capture)
    prefills = runner._graphs.prefills
    assert prefills is not None
    for size in prefills.sizes:
        prefills.inputs.batch(size)  # makes its tensors, as a capture that runs does
    runner.capture_mixes(capture)
    runner.capture_checks(max_sequences, max_drafts, max_tokens, capture)
    runner.capture_mixed_checks(capture)
