"""Captured decodes: padding, future tokens, block tables. Captures are faked: CUDA has its own test."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from headrace.cache.tails import Tail
from headrace.engine.graphs.captured_passes import (
    BATCH_SIZES,
    Captured,
    CapturedPasses,
    nothing_collected,
    sizes_up_to,
)
from headrace.engine.graphs.prefill_inputs import MOST_SEQUENCES, PrefillInputs
from headrace.engine.runner import ModelRunner
from headrace.engine.sampling.draw import Draw
from headrace.engine.warm_up import warm_up
from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.lib.dot import dot_block
from headrace.kernels.lib.tails import TailField
from headrace.models.model import HybridModel
from headrace.request import Sampling
from tests.support.engine.fake_passes import (
    BLOCK_SIZE,
    LAYOUT,
    Model,
    Setup,
    decode,
    hidden_without_layers,
    logits_of,
    rerun,
)
from tests.support.engine.oracle import random_prompt

GREEDY = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), 0)
HOT = Draw(Sampling(max_tokens=1, seed=3, temperature=2.0), 0)


@pytest.fixture
def setup() -> Setup:
    return Setup.of_decodes_and_prefills()


def test_rows_say_where_each_sequence_stands(setup: Setup) -> None:
    logits = logits_of(setup, [decode(7, 9, [5, 0, 3], 4, 4), decode(8, 0, [2], None, 6)])
    (batch,) = setup.model.seen
    assert batch.tokens_T.tolist() == [7, 8] and batch.positions_T.tolist() == [9, 0]
    assert batch.block_T.tolist() == [3, 2] and batch.offset_T.tolist() == [1, 0]
    (group,) = batch.decode.groups
    assert group.source.slots_N.tolist() == [4, -1] and group.dst_slots.tolist() == [4, 6]
    contexts = batch.decode.attention.contexts
    assert contexts.lens_R.tolist() == [10, 1]
    assert contexts.table_NM[0, :3].tolist() == [5, 0, 3] and contexts.table_NM[1, :1].tolist() == [2]
    assert logits.argmax(-1).tolist() == setup.drawn[:2].tolist() == [8, 9]


def test_tails_say_what_is_read_of_the_ring_and_when_a_state_is_written(setup: Setup) -> None:
    inputs = [
        replace(decode(7, 3, [5], 4, 4), tail=Tail(2, 1, None)),
        replace(decode(8, 7, [2, 1], 6, 1), tail=Tail(0, 4, 8)),
    ]
    setup.graphs.run(inputs)
    (batch,) = setup.model.seen
    expected = [[4, -1, 2, 1, 2, 0], [6, 1, 0, 4, 3, 4]]
    assert batch.decode.groups[0].tails.fields.tolist() == expected
    built = ForwardBatch.build(inputs, 4, torch.device("cpu"), tail_places=setup.memory.tail_places)
    assert built.decode_groups[0].tails.fields.tolist() == expected


def test_padding_sees_nothing_and_writes_where_nobody_looks(setup: Setup) -> None:
    setup.graphs.run([decode(1, 4, [0, 1], i, i) for i in range(8)])  # leaves its traces in every row
    logits = logits_of(setup, [decode(7, 1, [i], i, i) for i in range(3)])
    batch = setup.model.seen[-1]
    assert len(logits) == 3 and batch.num_decodes == 4
    (group,) = batch.decode.groups
    assert group.source.slots_N.tolist() == group.dst_slots.tolist() == [0, 1, 2, -1]
    assert group.tails.fields[:, TailField.ROW].tolist() == [0, 1, 2, -1]
    assert batch.decode.attention.contexts.lens_R.tolist() == [2, 2, 2, 0]
    assert batch.block_T.tolist() == [0, 1, 2, setup.memory.scratch_block]
    assert setup.memory.kv_pools[0][0].shape[0] == setup.memory.num_blocks + 1 == setup.memory.scratch_block + 1


def test_tokens_of_the_launch_before_are_taken_in_any_order(setup: Setup) -> None:
    setup.graphs.run([decode(10, 1, [0], 0, 0), decode(20, 1, [1], 1, 1), decode(30, 1, [2], 2, 2)])
    setup.graphs.run(
        [decode(0, 2, [2], 2, 2, future_token=2), decode(40, 1, [3], 3, 3), decode(0, 2, [0], 0, 0, future_token=0)]
    )
    assert setup.model.seen[-1].tokens_T.tolist()[:3] == [31, 40, 11]
    assert setup.drawn[:3].tolist() == [32, 41, 12]


def test_block_tables_follow_lists_that_grow_and_rows_that_change_hands(setup: Setup) -> None:
    mine, others = [5, 4], [1]

    def table(*steps: SequenceInput) -> list[list[int]]:
        setup.graphs.run(steps)
        contexts = setup.model.seen[-1].decode.attention.contexts
        return [contexts.table_NM[row, : -(-step.end // BLOCK_SIZE)].tolist() for row, step in enumerate(steps)]

    assert table(decode(1, 7, mine, 0, 0), decode(1, 3, others, 1, 1)) == [[5, 4], [1]]
    mine.append(0)
    assert table(decode(1, 8, mine, 0, 0), decode(1, 3, others, 1, 1)) == [[5, 4, 0], [1]]
    assert table(decode(1, 3, others, 1, 1), decode(1, 9, mine, 0, 0)) == [[1], [5, 4, 0]]
    assert table(decode(1, 5, [3, 2], 0, 0)) == [[3, 2]]


def test_what_does_not_fit_is_left_to_the_plain_path(setup: Setup) -> None:
    one = decode(1, 1, [0], 0, 0)
    assert setup.graphs.run([one]) is not None
    assert setup.graphs.run([]) is None
    assert setup.graphs.run([decode(1, 1, [i], i, i) for i in range(9)]) is None
    assert setup.graphs.run([one, SequenceInput([1] * 17, 1, list(range(5)), 1, 1)]) is None
    assert setup.graphs.run([SequenceInput([1, 2], 1, [1], 1, 1, num_logits=2)]) is None
    assert setup.graphs.run([decode(1, 1, [0] * 40, 0, 0)]) is None


def test_rows_of_a_prefill_stand_in_front_and_padding_is_a_sequence_of_its_own(setup: Setup) -> None:
    silent = SequenceInput([1, 2], 4, [3, 1], 2, 2, num_logits=0)
    logits = logits_of(setup, [silent, SequenceInput([5, 6, 7], 3, [0, 5], 4, 1, emit=((4, 7),))])
    (batch,) = setup.model.seen
    scratch = setup.memory.scratch_block
    assert batch.tokens_T.tolist() == [5, 6, 7, 1, 2, 0, 0, 0]  # first those whose logits are asked for
    assert batch.positions_T.tolist() == [3, 4, 5, 4, 5, 0, 1, 2]
    assert batch.block_T.tolist() == [0, 5, 5, 1, 1, *[scratch] * 3]
    assert batch.offset_T.tolist() == [3, 0, 1, 0, 1, 0, 1, 2]
    chunks, nobody = batch.prefill.attention.chunks, MOST_SEQUENCES - 2
    assert chunks.first_row_N1.tolist() == [0, 3, 5, *[5] * nobody, 8]
    assert chunks.start_N.tolist() == [3, 4, *[0] * nobody, 0]
    assert chunks.table_NM[:2, :2].tolist() == [[0, 5], [3, 1]] and set(chunks.table_NM[-1].tolist()) == {scratch}
    table = batch.prefill.segments.chunk_table(4)
    assert [row[:3] for row in table.chunks_C4.tolist()][:4] == [[0, 1, 7], [1, 2, 1], [3, 2, 2], [5, 3, -1]]
    assert all(row[1:3] == [-1, -1] for row in table.chunks_C4.tolist()[4:])
    of_nobody = [3, 3, -1]
    sequences = [row[:3] for row in table.sequences_N4.tolist()]
    assert sequences == [[0, 2, 4], [2, 3, 2], *[of_nobody] * nobody, [3, 4, -1]]
    assert batch.last_token_queries.contexts.lens_R.tolist() == [6, 6, *[0] * nobody]
    assert logits.argmax(-1).tolist() == [8]


def test_decodes_and_the_prefills_behind_them_are_two_replays(setup: Setup) -> None:
    prefill = SequenceInput([5, 6, 7], 0, [1], None, 1)
    logits = logits_of(setup, [decode(10, 1, [0], 0, 0), decode(20, 1, [2], 2, 2), prefill])
    assert [batch.num_decodes for batch in setup.model.seen] == [2, 0]
    assert logits.argmax(-1).tolist() == [11, 21, 8]


def test_chunks_of_one_token_are_rows_of_the_decode_pass_wherever_they_stand(setup: Setup) -> None:
    """A budget's rest of one token: such a step was launched kernel by kernel, which took 30 ms."""
    begun, ended = SequenceInput([40], 0, [3], None, 3, num_logits=0), SequenceInput([41], 4, [4, 5], 4, 4)
    prefill = SequenceInput([5, 6, 7], 0, [1], None, 1)
    logits = logits_of(setup, [decode(10, 1, [0], 0, 0), prefill, begun, ended, decode(20, 1, [2], 2, 2)])
    decodes, prefills = setup.model.seen
    assert decodes.tokens_T.tolist() == [10, 41, 20, 40] and prefills.tokens_T.tolist()[:3] == [5, 6, 7]
    assert logits.argmax(-1).tolist() == [11, 8, 42, 21]  # in the order of the step


def test_more_prompts_than_a_pass_takes_are_several_passes(setup: Setup) -> None:
    many = [SequenceInput([10 + i, 20 + i], 0, [i % 6], None, i, num_logits=i % 3 and 1) for i in range(9)]
    logits = logits_of(setup, many)
    assert [sum(token >= 10 for token in batch.tokens_T.tolist()) for batch in setup.model.seen] == [16, 2]
    assert logits.argmax(-1).tolist() == [21 + i for i in range(9) if i % 3]


@pytest.mark.parametrize("tokens", [[1], [1, 2]], ids=["decode", "prefill"])
def test_steps_that_would_mix_sequences_are_refused(setup: Setup, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="slot 3 is written twice"):
        setup.graphs.run([decode(1, 1, [0], 3, 3), SequenceInput(tokens, 1, [1], 2, 3)])


def test_captured_sizes_cover_the_largest_step() -> None:
    assert sizes_up_to(1, BATCH_SIZES) == [1]
    assert sizes_up_to(64, BATCH_SIZES) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert sizes_up_to(65, BATCH_SIZES) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96]
    assert sizes_up_to(8192, BATCH_SIZES) == list(BATCH_SIZES)


@pytest.mark.parametrize(
    ("num_rows", "is_replayed"), [(2000, True), (4096, True), (4097, False), (7167, False), (7168, True), (8193, False)]
)
def test_long_passes_are_replayed_where_they_are_nearly_full(num_rows: int, *, is_replayed: bool) -> None:
    memory = CacheMemory(LAYOUT, num_blocks=6, num_slots=9)
    model = Model(torch.zeros(64, dtype=torch.int64))
    passes = CapturedPasses(model.forward, PrefillInputs(memory, 8192, 16384), (4096, 8192), rerun)
    assert passes.fits([SequenceInput([1] * num_rows, 0, range(6), None, 0)]) is is_replayed


def test_the_collector_rests_during_a_capture_and_is_as_it_was_behind_it() -> None:
    with pytest.raises(RuntimeError, match="capture"), nothing_collected():
        assert not gc.isenabled()
        raise RuntimeError("a capture failed")
    assert gc.isenabled()
    gc.disable()
    try:
        with nothing_collected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is test_cuda.py that does this")
@pytest.mark.parametrize("draw", [GREEDY, HOT], ids=["greedy", "drawn"])
def test_replayed_decodes_give_the_tokens_of_plain_ones(draw: Draw, load_family) -> None:
    """A whole model, full batches only: the CPU's reference kernels do not know padding."""
    prompts, answers = [random_prompt(n) for n in (5, 33)], []
    for replays in (False, True):
        runner = load_family("granite").runner()
        steps = [SequenceInput(p, 0, range(i * 8, i * 8 + 8), None, i) for i, p in enumerate(prompts)]
        taken = [runner.launch(steps, [(0, draw), (1, draw)]).drawn.tokens()]
        if replays:
            runner.capture_decodes(2, 128, capture=partial(rerun_loaded, runner))
        for n in range(6):
            steps = [
                SequenceInput((0,), len(p) + n, range(i * 8, i * 8 + 8), i, i, future_token=i)
                for i, p in enumerate(prompts)
            ]
            taken.append(runner.launch(steps, [(0, draw), (1, draw)]).drawn.tokens())
        answers.append(taken)
    assert answers[0] == answers[1]


def test_all_captured_passes_write_their_logits_to_one_place(load_family, monkeypatch) -> None:
    """A hundred passes with rows of their own would take as much memory as the model."""
    runner, captured = load_family("granite").runner(), []
    monkeypatch.setattr(HybridModel, "hidden", hidden_without_layers)

    def capture(work: Callable[[], Tensor]) -> Captured:
        captured.append(Captured(lambda: None, work()))
        return captured[-1]

    runner.capture_decodes(24, 128, capture)
    runner.capture_prefills(64, 128, capture)
    runner.capture_mixes(capture)
    runner.capture_checks(24, 3, 128, capture)
    runner.capture_mixed_checks(capture)
    assert len({pass_.logits.data_ptr() for pass_ in captured}) == 1
    assert max(len(pass_.logits) for pass_ in captured) == 24 * 4 + MOST_SEQUENCES


def rerun_loaded(runner: ModelRunner, work: Callable[[], Tensor]) -> Captured:
    """As `rerun`, but nothing runs before the inputs are loaded: they are all padding, which needs Triton."""
    logits = torch.empty(2, runner.model.config.vocab_size)
    return Captured(lambda: logits.copy_(work()), logits)


@pytest.mark.parametrize(("max_step_tokens", "family"), [(64, "granite"), (3, "qwen35_moe"), (4096, "qwen35")])
def test_warm_up_runs_within_the_pools_there_are(max_step_tokens: int, family: str, load_family) -> None:
    warm_up(load_family(family).runner(), max_step_tokens=max_step_tokens, max_running=2, max_tokens=64, graphs=False)


@pytest.mark.parametrize("num_blocks", [3, 6, 40])
@pytest.mark.parametrize("block_size", [1, 2])
def test_warm_up_runs_on_the_smallest_blocks(block_size: int, num_blocks: int, load_family) -> None:
    model = load_family("granite").model
    runner = ModelRunner(model, CacheMemory(model.cache_layout(block_size), num_blocks, 3))
    warm_up(runner, max_step_tokens=64, max_running=2, max_tokens=64, graphs=False)


def test_warm_up_meets_every_size_of_small_products(load_family, monkeypatch) -> None:
    """Their tiles pad rows to 16, 32 and 64: none may be left to compile for the first short prompt."""
    runner, widths = load_family("granite").runner(), set()
    launch = runner.launch

    def recorded(steps, *draws_and_scores):
        widths.add(dot_block(sum(len(step.tokens) for step in steps)))
        return launch(steps, *draws_and_scores)

    monkeypatch.setattr(runner, "launch", recorded)
    warm_up(runner, max_step_tokens=4096, max_running=2, max_tokens=64, graphs=False)
    assert widths >= {16, 32, 64}
