"""Batches of steps: the order of rows, and the checks between steps and slots."""

import pytest
import torch

from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.sequence_input import SequenceInput

CPU = torch.device("cpu")


def step(tokens: int = 1, start: int = 5, blocks=(0, 1, 2, 3), src: int | None = 0, dst: int = 0, **more):
    return SequenceInput(list(range(1, tokens + 1)), start, blocks, src, dst, **more)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": 0}, "at least one token"),
        ({"tokens": 3, "num_logits": 2}, "num_logits 2"),
        ({"start": 0, "src": 1}, "fresh state"),
        ({"start": 5, "src": None}, "fresh state"),
        ({"tokens": 4, "emit": ((5, 2),)}, "emit at 5"),
        ({"tokens": 4, "emit": ((9, 2),)}, "emit at 9"),
    ],
)
def test_impossible_steps_are_refused(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        step(**fields)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([step(tokens=12)], "4 blocks of 4 do not cover 17 tokens"),
        ([step(src=1, dst=2), step(src=3, dst=2)], "slot 2 is written twice"),
        ([step(tokens=4, src=1, dst=1, emit=((8, 1),))], "slot 1 is written twice"),
        ([step(src=1, dst=1), step(src=1, dst=2)], "slot 1 is read by one sequence and written for another"),
        ([step(tokens=4, src=1, dst=2, emit=((8, 1),))], "slot 1 is read by one sequence and written"),
    ],
    ids=["blocks", "two-destinations", "emit-over-destination", "anothers-source", "emit-over-source"],
)
def test_steps_that_would_mix_sequences_are_refused(steps: list[SequenceInput], message: str):
    with pytest.raises(ValueError, match=message):
        ForwardBatch.build(steps, block_size=4, device=CPU)


def test_plan_puts_decodes_first_and_logits_in_the_order_of_the_steps():
    batch = ForwardBatch.build(
        [
            step(tokens=3, start=5, src=0, dst=0, num_logits=3),
            step(tokens=1, start=7, blocks=(9, 8), src=1, dst=1),
            step(tokens=2, start=0, blocks=(5,), src=None, dst=2, num_logits=1),
        ],
        block_size=4,
        device=CPU,
    )
    assert batch.num_decodes == 1
    assert batch.positions_T.tolist() == [7, 5, 6, 7, 0, 1]
    assert batch.block_T.tolist() == [8, 1, 1, 1, 5, 5]
    assert batch.offset_T.tolist() == [3, 1, 2, 3, 0, 1]
    assert batch.logit_rows is not None and batch.logit_rows.tolist() == [1, 2, 3, 0, 5]


@pytest.mark.parametrize(
    ("steps", "with_last_token_queries", "num_queries"),
    [
        ([step(tokens=3), step(tokens=2, src=2, dst=2)], True, 2),
        ([step(tokens=3), step(tokens=2, src=2, dst=2)], False, None),  # no layer would read them
        ([step()], True, None),  # all rows have logits
        ([step(tokens=3, num_logits=3), step(tokens=2, src=2, dst=2)], True, None),
        ([step(tokens=3, num_logits=0)], True, None),
    ],
)
def test_queries_of_last_tokens_are_made_for_a_model_that_uses_them(
    steps: list[SequenceInput], with_last_token_queries: bool, num_queries: int | None
):
    batch = ForwardBatch.build(steps, block_size=4, device=CPU, with_last_token_queries=with_last_token_queries)
    queries = batch.last_token_queries
    assert (None if queries is None else queries.num_rows) == num_queries
