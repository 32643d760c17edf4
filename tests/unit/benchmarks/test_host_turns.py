"""The benchmark of a turn's host work runs, and times every part of turns with decodes alone."""

from benchmarks.engine.host_turns import PARTS, engine_of, quickest_tenth_us


def test_turns_of_few_chats_are_timed_whole_and_by_part():
    with engine_of(".", [3, 64, 16, 40, PARTS]) as engine:
        turns = engine.turns()
    assert len(turns) >= 400
    # A turn behind which nothing is in flight yet takes no tokens.
    whole = [turn for turn in turns if set(PARTS) < set(turn)]
    assert len(whole) > 380
    assert all(sum(turn[part] for part in PARTS) < turn["turn"] for turn in whole)


def test_the_tenth_percentile_is_shown_and_a_part_that_never_ran_counts_as_nothing():
    turns = [{"turn": 1e-6 * n} for n in (9, 2, 8, 3, 1, 4, 7, 6, 5, 10)]
    assert round(quickest_tenth_us(turns, "turn")) == 2
    assert quickest_tenth_us(turns, "launch") == 0
