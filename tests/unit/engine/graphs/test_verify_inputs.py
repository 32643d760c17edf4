"""Captured passes that check drafts, and those of an MTP layer, in Triton's interpreter: equal to plain steps."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.cache.tails import BehindCheck, Tail
from headrace.engine.drafts.passes import DraftStart, draft_tokens
from headrace.engine.graphs.captured_passes import checked_sizes
from headrace.engine.graphs.verify_inputs import VerifyInputs
from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput, known_place
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.lib.tails import TailField
from headrace.kernels.sampling.checked_rows import CheckSources
from headrace.models.weights import load_model
from tests.support.engine.checks import LENGTHS_BEFORE, behind_a_check, drafted
from tests.support.engine.interpreted import (
    BLOCKS_EACH,
    assert_same_memory,
    blocks_of,
    forget_all,
    replayed_checks,
    step,
)
from tests.support.engine.mtp_checkpoints import add_mtp
from tests.support.engine.oracle import random_prompt

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is test_cuda.py that does this")
MAX_TOKENS = BLOCKS_EACH * 16


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


def runners_behind(lengths: tuple[int, ...], path: Path) -> tuple[ModelRunner, ModelRunner]:
    """Two runners behind prompts of these lengths; the second one has captured its checks and the layer's passes."""
    plain, ours = runner_of(path), runner_of(path)
    prompts = [random_prompt(n, seed=n) for n in lengths]
    for runner in (plain, ours):
        runner.forward([step(i, prompt, 0, len(prompt), None, i) for i, prompt in enumerate(prompts)])
    ours.capture_checks(4, 3, MAX_TOKENS, replayed_checks(ours.model.config.vocab_size))
    return plain, ours


@pytest.mark.slow
@torch.inference_mode()
def test_a_captured_check_equals_a_plain_one_row_for_row_and_state_for_state(with_layer: Path) -> None:
    """Sequences with three drafts, with one, and with none, and one of padding; some drafts are on the device alone."""
    plain, ours = runners_behind((17, 31, 15), with_layer)
    inputs = [
        drafted(0, [1, 2, 3, 4], 17),
        drafted(1, [5], 31, written=32, dst=1),
        drafted(2, [6, 7], 15, written=16),
    ]
    ours._sources.drafted[2, :3] = torch.tensor([2, 3, 4])
    future = replace(inputs[0], tokens=[1, 0, 0, 0], future_drafts=2)
    replayed = ours._graphs.run([future, *inputs[1:]])
    assert replayed is not None and replayed.is_drawn
    expected = plain.forward(inputs).rows
    torch.testing.assert_close(replayed.logits, expected, atol=2e-3, rtol=1e-3)
    assert ours._drawn[:7].tolist() == expected.argmax(-1).tolist()
    assert_same_memory(ours, plain)
    # Behind two of the drafts, behind a state that was written in place, and behind one that was written elsewhere.
    after = [
        replace(drafted(0, [7, 8], 20), tail=Tail(0, 17, None)),
        drafted(1, [9], 32),
        replace(drafted(2, [8], 17), src_slot=11, tail=Tail(2, 16, None)),
    ]
    replayed = ours._graphs.run(after)
    assert replayed is not None
    torch.testing.assert_close(replayed.logits, plain.forward(after).rows, atol=2e-3, rtol=1e-3)


@pytest.mark.slow
@torch.inference_mode()
def test_a_check_behind_another_one_finds_its_places(with_layer: Path) -> None:
    plain, ours = runners_behind(LENGTHS_BEFORE, with_layer)
    behind, known = behind_a_check((plain, ours), ours)
    assert [known_place(entry, right, 16).tail for entry, right in zip(behind[:2], (2, 0), strict=True)] == [
        entry.tail for entry in known[:2]
    ]
    replayed = ours._graphs.run(behind)
    assert replayed is not None and replayed.is_drawn
    torch.testing.assert_close(replayed.logits, plain.forward(known).rows, atol=2e-3, rtol=1e-3)
    assert_same_memory(ours, plain)


def test_a_check_names_the_blocks_of_a_sequence_once_for_all_its_rows() -> None:
    """So that a context is read once. Rows of padding have none, and their keys and values go to the scratch block."""
    layout = CacheLayout("f", "float32", "float32", 16, (AttentionGroup(1, 1, 4),), (StateGroup(1, (2, 3), (2, 4)),))
    memory = CacheMemory(layout, 4 * BLOCKS_EACH, 12)
    none = torch.zeros(16, dtype=torch.int64)
    inputs = VerifyInputs(memory, CheckSources(none, none.repeat(3, 1), none), 4, 4, MAX_TOKENS)
    assert inputs.batch(16).block_T.tolist() == [memory.scratch_block] * 16  # captures run on padding
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


def test_each_sequence_of_a_check_is_placed_by_its_own_numbers() -> None:
    """Known or not, with a tail or a slot for each state; the check before has counted drafts of one of them alone."""
    layout = CacheLayout("f", "float32", "float32", 16, (AttentionGroup(1, 1, 4),), (StateGroup(1, (2, 3), (2, 4)),))
    memory = CacheMemory(layout, 4 * BLOCKS_EACH, 12)
    num_accepted = torch.full((16,), 3)
    num_accepted[5] = 1
    sources = CheckSources(torch.arange(40, 56), torch.arange(100, 148).view(16, 3), num_accepted)
    inputs = VerifyInputs(memory, sources, 4, 4, MAX_TOKENS)
    unknown = SequenceInput([0, 0], 30, blocks_of(2), 2, 10, num_logits=2, future_token=4, future_drafts=3,
                            tail=Tail(2, 29, None), behind=BehindCheck(5, 3, None, 8))  # fmt: skip
    by_slots = SequenceInput([6, 7, 8], 9, blocks_of(3), 3, 7, emit=((10, 8), (11, 9)), num_logits=3)
    inputs.load([drafted(0, [1, 2, 3, 4], 14, written=16), drafted(1, [5], 30), unknown, by_slots], 16)
    batch = inputs.batch(16)
    assert batch.decode is not None and batch.logit_rows is not None
    [group] = batch.decode.groups
    assert group.tails is not None
    assert batch.tokens_T.view(4, 4).tolist() == [[1, 2, 3, 4], [5, 0, 0, 0], [45, 109, 0, 0], [6, 7, 8, 0]]
    assert batch.positions_T.view(4, 4).tolist() == [[14, 15, 16, 17], [30, 0, 0, 0], [31, 32, 0, 0], [9, 10, 11, 0]]
    assert batch.block_T.view(4, 4)[2, :2].tolist() == blocks_of(2)[1:3]
    assert group.dst_slots.tolist() == [[-1, -1, -1, 11], [1, -1, -1, -1], [-1, 10, -1, -1], [8, 9, 7, -1]]
    assert group.source.slots_N.tolist() == [0, 1, 2, 3]
    assert group.tails.fields[:, TailField.KEPT].tolist() == [0, 0, 2, 0]  # tokens behind the state of each
    assert batch.logit_rows[:10].tolist() == [0, 1, 2, 3, 4, 8, 9, 12, 13, 14]


@torch.inference_mode()
def test_captured_passes_of_the_layer_draft_what_launched_ones_do(with_layer: Path) -> None:
    plain, ours = runners_behind((14, 30, 9), with_layer)
    starts = [
        DraftStart(3, 14, blocks_of(0), 0, 3),
        DraftStart(4, 30, blocks_of(1), 1, 1),
        DraftStart(5, 9, blocks_of(2), 2, 2),
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
