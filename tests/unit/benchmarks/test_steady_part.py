"""The steady part of a run: the share of a turn that lies in it."""

import pytest

from benchmarks.steady_part import SteadyPart


@pytest.mark.parametrize(
    ("begun_s", "ended_s", "share"),
    [
        (12.0, 18.0, 1.0),
        (10.0, 20.0, 1.0),
        (8.0, 12.0, 0.5),
        (17.0, 21.0, 0.75),
        (5.0, 25.0, 0.5),
        (4.0, 9.0, 0.0),
        (6.0, 10.0, 0.0),
        (20.0, 24.0, 0.0),
    ],
    ids=["inside", "all of it", "over its start", "over its end", "around it", "before", "until it starts", "after"],
)
def test_a_turn_counts_by_the_part_of_its_time_that_is_steady(begun_s: float, ended_s: float, share: float) -> None:
    assert SteadyPart(10.0, 20.0).share_of(begun_s, ended_s) == share


def test_the_shares_of_neighbouring_parts_add_up_to_one_turn() -> None:
    parts = [SteadyPart(0.0, 3.0), SteadyPart(3.0, 7.5), SteadyPart(7.5, 20.0)]
    assert sum(part.share_of(2.0, 12.0) for part in parts) == pytest.approx(1.0)
