"""Decodes or checks and a chunk in one pass: which steps are one, and what its rows are. Captures are faked."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.cache.tails import BehindCheck, Tail
from headrace.engine.graphs import mixed_inputs
from headrace.engine.graphs.captured_passes import MOST_CHECKED_ROWS, Captured, CapturedPasses
from headrace.engine.graphs.mixed_inputs import MixedInputs
from headrace.engine.graphs.prefill_inputs import MOST_SEQUENCES
from headrace.engine.graphs.verify_inputs import VerifyInputs
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.sampling.checked_rows import CheckSources
from headrace.models.model import HybridModel
from tests.support.engine.fake_passes import Setup, decode, hidden_without_layers, logits_of, rerun


@pytest.fixture
def mixing() -> Setup:
    """With passes of 4 or 8 decodes and a chunk."""
    setup = Setup.of_decodes_and_prefills()
    decodes, prefills = setup.graphs.decodes, setup.graphs.prefills
    mixes = [
        CapturedPasses(
            setup.model.forward, MixedInputs(decodes.inputs, prefills.inputs, count), (count + 8, count + 16), rerun
        )
        for count in (4, 8)
    ]
    setup.graphs.mixes = tuple(mixes)
    setup.model.seen.clear()
    return setup


@pytest.fixture
def checking() -> Setup:
    """With passes that check one draft or three of each of up to four sequences, and these beside a chunk of 8 rows."""
    setup = Setup.of_decodes_and_prefills()
    prefills, forward, drafts = setup.graphs.prefills, setup.model.forward, torch.zeros(16, 3, dtype=torch.int64)
    sources = CheckSources(setup.drawn, drafts, torch.zeros_like(drafts[:, 0]))
    checks = [VerifyInputs(setup.memory, sources, 4, rows_each, max_tokens=40) for rows_each in (2, 4)]
    setup.graphs.checks = tuple(
        CapturedPasses(forward, inputs, (2 * inputs.rows_each, 4 * inputs.rows_each), rerun) for inputs in checks
    )
    setup.graphs.mixed_checks = tuple(
        CapturedPasses(
            forward,
            MixedInputs(inputs, prefills.inputs, count * inputs.rows_each),
            (count * inputs.rows_each + 8,),
            rerun,
        )
        for inputs in checks
        for count in (2, 3)
    )
    setup.model.seen.clear()
    return setup


def drafted(tokens: list[int], blocks: list[int], slot: int, free: list[int], future_token: int | None = None):
    """Behind one token; the states behind all tokens but the last go to the `free` slots."""
    emit = tuple(enumerate(free, 2))
    return SequenceInput(tokens, 1, blocks, slot, slot, emit, num_logits=len(tokens), future_token=future_token)


def test_decodes_and_a_chunk_are_one_pass_where_it_was_captured(mixing: Setup) -> None:
    prefill = SequenceInput([5, 6, 7], 3, [3, 1], 6, 1)
    replayed = mixing.graphs.run([decode(10, 1, [0], 0, 0), decode(20, 1, [2], 2, 2), prefill])
    (batch,) = mixing.model.seen
    scratch = mixing.memory.scratch_block
    assert batch.num_decodes == 4
    assert batch.tokens_T.tolist() == [10, 20, 0, 0, 5, 6, 7, 0, 0, 0, 0, 0]
    assert batch.positions_T.tolist()[:7] == [1, 1, 0, 0, 3, 4, 5]
    assert batch.block_T.tolist()[:8] == [0, 2, scratch, scratch, 3, 1, 1, scratch]
    assert batch.decode.groups[0].dst_slots.tolist() == [0, 2, -1, -1]
    assert batch.prefill.attention.chunks.start_N.tolist()[0] == 3
    assert batch.logit_rows.tolist()[:3] == [0, 1, 6]
    queries = batch.last_token_queries
    assert queries.num_rows == len(batch.logit_rows) == 4 + MOST_SEQUENCES
    assert queries.contexts.lens_R.tolist()[:3] == [2, 2, 6]
    assert [queries.contexts.table_NM[row, 0] for row in range(3)] == [0, 2, 3]
    assert replayed.logits.argmax(-1).tolist() == mixing.drawn[:3].tolist() == [11, 21, 8]
    assert replayed.is_drawn


def test_tokens_that_a_mixed_pass_has_drawn_feed_the_next_one(mixing: Setup) -> None:
    silent = SequenceInput([1, 2], 4, [3, 1], 2, 2, num_logits=0)
    mixing.graphs.run([decode(10, 1, [0], 0, 0), silent, SequenceInput([5, 6], 0, [4], None, 1)])
    replayed = mixing.graphs.run([decode(0, 2, [4], 1, 1, future_token=1), decode(0, 2, [0], 0, 0, future_token=0)])
    assert replayed.logits.argmax(-1).tolist() == [8, 12]


def test_a_mixed_step_that_no_pass_holds_whole_takes_several(mixing: Setup) -> None:
    """Nine prompts, of which a pass takes eight; nine decodes would be too many for any pass."""
    prompts = [SequenceInput([10 + i, 20 + i], 0, [i % 6], None, 10 + i, num_logits=i % 2) for i in range(9)]
    decodes = [decode(30 + i, 1, [i % 6], i, i) for i in range(6)]
    replayed = mixing.graphs.run([*decodes[:5], *prompts, decodes[5]])
    assert [batch.num_decodes for batch in mixing.model.seen] == [8, 0]
    assert replayed.logits.argmax(-1).tolist() == [31, 32, 33, 34, 35, *[21 + i for i in range(9) if i % 2], 36]
    assert not replayed.is_drawn
    assert mixing.graphs.run([*prompts, *[decode(1, 1, [i % 6], i, i) for i in range(9)]]) is None


def test_a_mixed_pass_that_were_mostly_padding_is_none(mixing: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    step = [decode(10, 1, [0], 0, 0), SequenceInput([5, 6, 7], 3, [3, 1], 6, 1)]
    for most_padding, num_passes in ((3, 1), (2, 2)):  # the smallest pass has four decodes
        monkeypatch.setattr(mixed_inputs, "MOST_PADDING", most_padding)
        mixing.model.seen.clear()
        mixing.graphs.run(step)
        assert len(mixing.model.seen) == num_passes


def test_a_check_and_chunks_are_one_pass_where_it_was_captured(checking: Setup) -> None:
    checked = [drafted([10, 20, 30], [0], 0, [4, 5]), decode(40, 1, [2], 2, 2)]
    silent, prompt = SequenceInput([1, 2], 4, [3, 1], 7, 7, num_logits=0), SequenceInput([5, 6, 7], 3, [4, 5], 8, 1)
    replayed = checking.graphs.run([*checked, silent, prompt])
    (batch,) = checking.model.seen
    scratch = checking.memory.scratch_block
    assert batch.num_decodes == 8  # two sequences of four rows
    assert batch.tokens_T.tolist() == [10, 20, 30, 0, 40, 0, 0, 0, 5, 6, 7, 1, 2, 0, 0, 0]
    assert batch.positions_T.tolist()[:13] == [1, 2, 3, 0, 1, 0, 0, 0, 3, 4, 5, 4, 5]
    assert batch.block_T.tolist()[:9] == [0, 0, 0, scratch, 2, scratch, scratch, scratch, 4]
    assert batch.decode.groups[0].dst_slots.tolist() == [[4, 5, 0, -1], [2, -1, -1, -1]]
    assert batch.decode.attention.contexts.rows_each == 4 and batch.last_token_queries is None
    assert batch.prefill.attention.chunks.start_N.tolist()[:2] == [3, 4]
    assert len(batch.logit_rows) == 8 + MOST_SEQUENCES and batch.logit_rows.tolist()[:5] == [0, 1, 2, 4, 10]
    assert replayed.logits.argmax(-1).tolist() == checking.drawn[:5].tolist() == [11, 21, 31, 41, 8]
    assert replayed.is_drawn
    # The same pass with fewer rows that want logits, and tokens that it has drawn before.
    again = [drafted([0, 9], [0], 0, [4], future_token=1), SequenceInput([1, 2], 0, [3], None, 7)]
    assert checking.graphs.run([*again, drafted([0, 8, 8], [2], 2, [5, 6], future_token=4)]).is_drawn is False
    assert checking.model.seen[1].logit_rows.tolist()[:6] == [0, 1, 4, 5, 6, 9]
    assert checking.model.seen[1].tokens_T.tolist()[:7] == [21, 9, 0, 0, 8, 8, 8]
    assert len(checking.model.seen) == 2


def test_logits_of_drafts_stand_where_their_sequence_does(checking: Setup) -> None:
    prompt, other = SequenceInput([5, 6, 7], 3, [4, 5], 8, 1), SequenceInput([45], 0, [3], None, 3, is_prompt=True)
    checked = drafted([10, 20], [0], 0, [4])
    assert logits_of(checking, [prompt, checked, other]).argmax(-1).tolist() == [8, 11, 21, 46]


def test_a_check_takes_the_smallest_mixed_pass_that_holds_it(checking: Setup) -> None:
    chunk = SequenceInput([1, 2], 0, [3], None, 8)
    one, two, three = (decode(n, 1, [n], n, n) for n in range(3))
    pair, most = drafted([1, 2], [4], 4, [5]), drafted([1, 2, 3, 4], [5, 4], 6, [5, 7, 3])
    for singles, num_rows in (
        ([pair], 4),
        ([one, pair], 4),
        ([one, two, pair], 6),
        ([most], 8),
        ([one, two, most], 12),
    ):
        checking.graphs.run([*singles, chunk])
        assert checking.model.seen.pop().num_decodes == num_rows and not checking.model.seen
    for singles, rest in (([pair], [1] * 9), ([one, two, three, pair], [1, 2])):  # a check and a prefill
        checking.graphs.run([*singles, replace(chunk, tokens=rest, block_ids=[3, 4, 5])])
        assert [batch.num_decodes for batch in checking.model.seen] == [2 * max(2, len(singles)), 0]
        checking.model.seen.clear()
    assert checking.graphs.run([drafted([1] * 5, [4, 5], 4, [5, 6, 7, 3]), chunk]) is None
    behind = replace(one, future_token=0, tail=Tail(0, 1, None), behind=BehindCheck(0, 1, None, 0))
    checking.graphs.run([behind, chunk])
    assert checking.model.seen.pop().num_decodes == 4


@torch.inference_mode()
@pytest.mark.parametrize(
    ("max_running", "max_step_tokens", "max_drafts", "rows_each", "num_passes"),
    [(64, 8192, 3, {2, 4}, 80), (64, 8192, 1, {2}, 40), (8, 8192, 7, {2, 4}, 20), (256, 24, 3, {2, 4}, 10)],
)
def test_mixed_checks_are_few_and_capturing_them_changes_no_draw(
    max_running: int,
    max_step_tokens: int,
    max_drafts: int,
    rows_each: set[int],
    num_passes: int,
    load_family,
    monkeypatch,
) -> None:
    """Each takes a GPU 50 ms of its start."""
    runner, captured = load_family("granite").runner(), []
    monkeypatch.setattr(HybridModel, "hidden", hidden_without_layers)

    def capture(work: Callable[[], Tensor]) -> Captured:
        captured.append(Captured(lambda: None, work()))
        return captured[-1]

    runner.capture_prefills(max_step_tokens, 128, capture)
    runner.capture_checks(max_running, max_drafts, 128, capture)
    numbers = runner._drawn, runner._graphs.checks[0].inputs._sources.drafted
    for each in numbers:
        each.copy_(torch.arange(each.numel()).view_as(each))
    before = [each.clone() for each in numbers]
    captured.clear()
    runner.capture_mixed_checks(capture)
    assert all(torch.equal(*pair) for pair in zip(numbers, before, strict=True))
    assert {passes.inputs._singles.rows_each for passes in runner._graphs.mixed_checks} == rows_each
    assert len(captured) == num_passes
    assert max(len(each.logits) for each in captured) <= MOST_CHECKED_ROWS + MOST_SEQUENCES
