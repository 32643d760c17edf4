"""Captured passes that check drafts, and those of an MTP layer, in Triton's interpreter: equal to plain steps."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.cache.tails import TailStep
from headrace.engine.draft_passes import DraftStart, draft_tokens
from headrace.engine.graphs import Captured, checked_sizes
from headrace.engine.runner import ModelRunner
from headrace.engine.verify_inputs import VerifyInputs
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.attention.decode import PagedContexts
from headrace.models.weights import load_model
from tests.support.engine.interpreted import (
    BLOCKS_EACH,
    assert_same_memory,
    blocks_of,
    forget_all,
    step,
    triton_on_the_cpu,
)
from tests.support.engine.mtp_checkpoints import add_mtp
from tests.support.engine.oracle import random_prompt

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is test_cuda.py that does this")
MAX_TOKENS, MOST_ROWS = BLOCKS_EACH * 16, 16


def runner_of(path: Path) -> ModelRunner:
    model = load_model(str(path), torch.float32, "cpu", with_mtp=True)
    memory = CacheMemory(model.cache_layout(16), 4 * BLOCKS_EACH, 12)
    runner = ModelRunner(model, memory)
    forget_all(runner)
    return runner


@pytest.fixture
def with_layer(tiny_checkpoint, tmp_path: Path) -> Path:
    path = Path(shutil.copytree(tiny_checkpoint("qwen35"), tmp_path / "mtp"))
    add_mtp(path)
    return path


def once_needed(vocab_size: int, work: Callable[[], Tensor]) -> Captured:
    """As `in_triton`, but nothing runs before the first replay: a pass that is not replayed costs nothing."""
    logits = torch.empty(MOST_ROWS, vocab_size)

    def replay() -> None:
        with triton_on_the_cpu():
            found = work()
        logits[: len(found)] = found

    return Captured(replay, logits)


def drafted(sequence: int, tokens: list[int], start: int, written: int | None = None, dst: int = 11) -> SequenceInput:
    """A token and its drafts behind the state in its slot; the state after `written` tokens goes to `dst`."""
    tail, slots = TailStep(sequence, start, written), (sequence, sequence if written is None else dst)
    return SequenceInput(tokens, start, blocks_of(sequence), *slots, num_logits=len(tokens), tail=tail)


@pytest.mark.slow
@torch.inference_mode()
def test_a_captured_check_equals_a_plain_one_row_for_row_and_state_for_state(with_layer: Path) -> None:
    """Sequences with three drafts, with one, and with none, and one of padding; some drafts are on the device alone."""
    plain, ours = runner_of(with_layer), runner_of(with_layer)
    prompts = [random_prompt(n, seed=n) for n in (17, 31, 15)]
    for runner in (plain, ours):
        runner.forward([step(i, prompt, 0, len(prompt), None, i) for i, prompt in enumerate(prompts)])
    ours.capture_checks(4, 3, MAX_TOKENS, partial(once_needed, ours.model.config.vocab_size))
    inputs = [
        drafted(0, [1, 2, 3, 4], 17),
        drafted(1, [5], 31, written=32, dst=1),
        drafted(2, [6, 7], 15, written=16),
    ]
    ours._drafted[2, :3] = torch.tensor([2, 3, 4])
    future = replace(inputs[0], tokens=[1, 0, 0, 0], future_drafts=2)
    replayed = ours._graphs.run([future, *inputs[1:]])
    assert replayed is not None and replayed.is_drawn
    expected = plain.forward(inputs)
    torch.testing.assert_close(replayed.logits, expected, atol=2e-3, rtol=1e-3)
    assert ours._drawn[:7].tolist() == expected.argmax(-1).tolist()
    assert_same_memory(ours, plain)
    # Behind two of the drafts, behind a state that was written in place, and behind one that was written elsewhere.
    after = [
        replace(drafted(0, [7, 8], 20), tail=TailStep(0, 17, None)),
        drafted(1, [9], 32),
        replace(drafted(2, [8], 17), src_slot=11, tail=TailStep(2, 16, None)),
    ]
    replayed = ours._graphs.run(after)
    assert replayed is not None
    torch.testing.assert_close(replayed.logits, plain.forward(after), atol=2e-3, rtol=1e-3)


def test_a_check_names_the_blocks_of_a_sequence_once_for_all_its_rows() -> None:
    """So that a context is read once. Rows of padding have none, and their keys and values go to the scratch block."""
    layout = CacheLayout("f", "float32", "float32", 16, (AttentionGroup(1, 1, 4),), (StateGroup(1, (2, 3), (2, 4)),))
    memory = CacheMemory(layout, 4 * BLOCKS_EACH, 12)
    inputs = VerifyInputs(memory, torch.zeros(16, 3, dtype=torch.int64), 4, 4, MAX_TOKENS)
    inputs.load([drafted(2, [9, 9, 9, 9], 40), drafted(1, [9, 9, 9, 9], 40)], 8)
    inputs.load([drafted(0, [1, 2, 3, 4], 14), drafted(1, [5], 30)], 12)
    batch = inputs.batch(12)
    assert batch.decode is not None
    contexts = batch.decode.attention.contexts
    assert isinstance(contexts, PagedContexts) and contexts.rows_each == 4
    assert contexts.lens_R.tolist() == [15, 16, 17, 18, 31, *[0] * 7]
    assert contexts.table_NM[:2, :2].tolist() == [blocks_of(0)[:2], blocks_of(1)[:2]]
    ours, scratch = blocks_of(0), memory.scratch_block
    assert batch.block_T.tolist() == [ours[0], ours[0], ours[1], ours[1], blocks_of(1)[1], *[scratch] * 7]


@torch.inference_mode()
def test_captured_passes_of_the_layer_draft_what_launched_ones_do(with_layer: Path) -> None:
    plain, ours = runner_of(with_layer), runner_of(with_layer)
    prompts = [random_prompt(n, seed=n) for n in (14, 30, 9)]
    for runner in (plain, ours):
        runner.forward([step(i, prompt, 0, len(prompt), None, i) for i, prompt in enumerate(prompts)])
    ours.capture_checks(4, 3, MAX_TOKENS, partial(once_needed, ours.model.config.vocab_size))
    starts = [
        DraftStart(3 + i, len(prompt), blocks_of(i), i, num_drafts)
        for i, (prompt, num_drafts) in enumerate(zip(prompts, (3, 1, 2), strict=True))
    ]
    assert ours.draft_tokens(starts) == draft_tokens(plain.model, plain.memory, starts)
    assert_same_memory(ours, plain)


def test_checks_are_captured_for_a_few_numbers_of_rows_and_sequences() -> None:
    """Rows of a sequence by the drafts that there may be, and numbers of sequences; logits bound their product."""
    assert checked_sizes(4, 1) == {2: [2, 4, 8]}
    assert checked_sizes(4, 2) == {2: [2, 4, 8], 3: [3, 6, 12]}
    assert checked_sizes(4, 3) == {2: [2, 4, 8], 4: [4, 8, 16]}
    assert checked_sizes(1, 7) == {2: [2], 4: [4], 8: [8]}
    assert [rows[-1] for rows in checked_sizes(256, 3).values()] == [512, 512]
    assert checked_sizes(1, 10_000)[512] == [512]
