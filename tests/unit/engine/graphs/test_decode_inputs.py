"""The inputs of captured decodes: each row has its own sequence's blocks, whoever else decodes, in whatever order."""

import random

import torch

from headrace.engine.graphs.decode_inputs import PAD_SLOT, PAD_TAIL, DecodeInputs
from headrace.forward.sequence_input import SequenceInput

MAX_ROWS, BLOCK_SIZE = 16, 16


def test_rows_are_padding_before_the_first_step(load_family) -> None:
    """Captures run on them: they see nothing, and write to the scratch block alone."""
    memory = load_family("granite").runner().memory
    batch = DecodeInputs(memory, torch.zeros(64, dtype=torch.int64), MAX_ROWS, 30 * BLOCK_SIZE).batch(MAX_ROWS)
    [group] = batch.decode.groups
    assert batch.block_T.tolist() == [memory.scratch_block] * MAX_ROWS
    assert group.source.slots_N.tolist() == group.dst_slots.tolist() == [PAD_SLOT] * MAX_ROWS
    assert group.tails.fields.tolist() == [list(PAD_TAIL)] * MAX_ROWS
    assert not batch.decode.attention.contexts.lens_R.any()


def test_rows_have_their_sequences_blocks_in_any_order_and_as_sequences_come_and_go(load_family) -> None:
    memory = load_family("granite").runner().memory
    inputs = DecodeInputs(memory, torch.zeros(64, dtype=torch.int64), MAX_ROWS, 30 * BLOCK_SIZE)
    table = inputs.batch(MAX_ROWS).decode.attention.contexts.table_NM
    draw = random.Random(5)
    sequences: list[list[int]] = []
    for _ in range(200):
        draw.shuffle(sequences)
        del sequences[draw.randint(6, MAX_ROWS) :]
        for _ in range(draw.randint(0, MAX_ROWS - len(sequences)) or not sequences):
            sequences.append([draw.randrange(1000)])
        for ids in sequences:
            if draw.random() < 0.3 and len(ids) < 30:
                ids.append(draw.randrange(1000))
        decoding = sequences[: draw.randint(1, len(sequences))]
        entries = [SequenceInput((7,), len(ids) * BLOCK_SIZE - 1, ids, 0, 0) for ids in decoding]
        inputs.load(entries, MAX_ROWS)
        for row, ids in enumerate(decoding):
            assert table[row, : len(ids)].tolist() == ids
