"""Tails of running sequences: when states are written, and what follows them."""

import pytest

from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.tails import Tail, tail_interval, tail_places


@pytest.mark.parametrize(
    ("block_size", "interval"), [(1, 1), (2, 2), (8, 8), (12, 12), (16, 16), (20, 10), (32, 16), (48, 16), (17, 1)]
)
def test_every_end_of_a_block_is_one_of_an_interval(block_size: int, interval: int) -> None:
    assert tail_interval(block_size) == interval
    assert tail_places(block_size) == 2 * interval


@pytest.mark.parametrize(
    ("start", "end", "written"),
    [(5, 6, None), (6, 8, 8), (7, 8, 8), (7, 12, 8), (8, 9, None), (8, 16, 16), (8, 15, None)],
)
def test_a_step_writes_the_state_at_the_next_multiple(start: int, end: int, written: int | None) -> None:
    assert Tail(3, 5).step(ChunkSpan(start, end), 8) == Tail(3, 5, written)


def test_the_base_moves_if_all_tokens_before_the_written_state_count() -> None:
    step = Tail(3, 5, 8)
    assert step.after(7) == Tail(3, 5)
    assert step.after(8) == step.after(9) == Tail(3, 8)
    assert Tail(3, 5, None).after(7) == Tail(3, 5)
