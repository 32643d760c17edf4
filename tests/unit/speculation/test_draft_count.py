"""The number of drafts: as many as pay by measured acceptance and step times."""

import math
from dataclasses import replace

import pytest

from headrace.speculation.draft_count import (
    LATE_PROBE_SHARE,
    LOOK_TURNS,
    OWN_TRIES,
    PROBE_SHARE,
    Acceptance,
    AutoCount,
    FixedCount,
    Offer,
    PromptWork,
    StepPrice,
    best_counts,
)

PRICE = StepPrice(num_decoding=1, plain_s=4e-3, first_s=1e-3, draft_s=1e-4, limit_s=math.inf)


def offers(number: int = 1, most: int = 3) -> list[Offer]:
    return [Offer(Acceptance(OWN_TRIES), most) for _ in range(number)]


def turn(
    count: AutoCount, offered: list[Offer], now_s: float, num_accepted: int, price: StepPrice = PRICE
) -> list[int]:
    """One turn in which each sequence's drafts are right up to the `num_accepted`-th."""
    if count.rests():
        return [0] * len(offered)
    counts = count.counts(offered, price, now_s)
    count.drafted(sum(counts))
    for offer, number in zip(offered, counts, strict=True):
        if number:
            count.verified(offer._replace(most=number), min(number, num_accepted))
    return counts


def between_probes(count: AutoCount, offered: list[Offer], price: StepPrice) -> list[int]:
    """What it chooses; if that is nothing, behind a probe."""
    count.drafted(sum(count.counts(offered, price, 0.0)))
    return count.counts(offered, price, 0.0)


def test_the_rate_of_a_place_counts_only_drafts_behind_right_ones() -> None:
    record = Acceptance(remembered=1000)
    for num_accepted in (0, 0, 1, 2, 3, 3):
        record.add(3, num_accepted)
    rates = [record.rate(place, 0.5, 0.0) for place in range(4)]
    assert rates == pytest.approx([4 / 6, 3 / 4, 2 / 3, 0.5], abs=0.01)


def test_what_is_long_ago_counts_less() -> None:
    record = Acceptance(remembered=8)
    for num_accepted in [0] * 50 + [1] * 16:
        record.add(1, num_accepted)
    assert record.rate(0, 0.5, 1.0) > 0.8


@pytest.mark.parametrize(
    ("chances", "price", "expected"),
    [
        ([[0.9, 0.8, 0.7]], PRICE, [3]),
        ([[0.2, 0.04, 0.0]], PRICE, [0]),  # 1.2 tokens in 5.1 ms are fewer than 1 in 4
        ([[0.9, 0.01], [0.05]], replace(PRICE, num_decoding=2, draft_s=4e-4), [1, 0]),
        ([[0.9, 0.8, 0.7]], replace(PRICE, limit_s=5.25e-3), [2]),
        ([[0.9, 0.8, 0.7]], replace(PRICE, limit_s=4.5e-3), [0]),
        ([[0.9, 0.8, 0.7]], replace(PRICE, num_decoding=64), [0]),  # 63 others would wait for it
        ([[0.9, 0.8]] * 3, replace(PRICE, num_decoding=3), [2, 1, 1]),  # four in a step at most
    ],
)
def test_a_step_drafts_what_gives_the_most_tokens_a_second(chances, price, expected) -> None:
    counts = best_counts(chances, price, 4)
    assert sorted(counts, reverse=True) == expected


WAITING = PromptWork(most_s=1.0, least_s=0.2e-3, answer_s=50e-6)
BUSY = StepPrice(num_decoding=20, plain_s=5e-3, first_s=1e-3, draft_s=20e-6, limit_s=12e-3, prompts=WAITING)


@pytest.mark.parametrize(
    ("price", "expected"),
    [
        (replace(BUSY, prompts=None), 60),
        (BUSY, 60),  # 51 tokens more are worth 2.6 ms of prompts, and cost 2.2
        (replace(BUSY, prompts=replace(WAITING, answer_s=45e-6)), 0),  # they are worth 2.3: too little more of 7.9 ms
        (replace(BUSY, prompts=replace(WAITING, answer_s=20e-6)), 0),  # they are worth 1.0 ms, and cost 2.2
        (replace(BUSY, prompts=replace(WAITING, answer_s=150e-6)), 60),  # worth 7.7
        (replace(BUSY, prompts=replace(WAITING, most_s=0.3e-3)), 60),  # no more waits: the rest of the step is free
        (replace(BUSY, limit_s=6.61e-3, prompts=replace(WAITING, answer_s=150e-6)), 20),  # a block's time is kept
    ],
)
def test_where_prompts_wait_drafts_must_be_worth_the_time_they_take_from_them(price: StepPrice, expected: int) -> None:
    counts = best_counts([[0.9, 0.85, 0.8]] * 20, price, 100)
    assert sum(counts) == expected


def test_steps_with_drafts_and_prompts_are_late_on_their_own() -> None:
    """They read the weights once more: what drafts cost steps of answers alone says nothing of it."""
    count, price = AutoCount(64), replace(BUSY, prompts=replace(WAITING, answer_s=150e-6))
    for _ in range(100):
        for has_prompts, seconds in ((False, 5e-3), (True, 13e-3)):
            count.took(seconds, 5e-3, has_drafts=True, has_prompts=has_prompts)
            count.took(5e-3, 5e-3, has_drafts=False, has_prompts=has_prompts)
    assert sum(between_probes(count, offers(20), replace(price, prompts=None))) == 60
    assert sum(between_probes(count, offers(20), price)) == 0


def test_wrong_drafts_end_and_probes_take_no_more_than_their_share() -> None:
    count, offered, now_s = AutoCount(64), offers(8), 0.0
    price = replace(PRICE, num_decoding=8)
    spent, after_learning = 0.0, 0
    for number in range(20_000):
        drafted = sum(turn(count, offered, now_s, 0, price))
        seconds = price.of(drafted) if drafted else price.plain_s
        if number >= 200:
            after_learning += bool(drafted)
            spent += seconds - price.plain_s
        now_s += seconds
    assert after_learning > 10  # it goes on probing
    assert spent < 1.1 * PROBE_SHARE * now_s


def test_drafts_come_back_when_they_are_right_again() -> None:
    count, offered, now_s = AutoCount(64), offers(8), 0.0
    price = replace(PRICE, num_decoding=8)
    for _ in range(2000):
        turn(count, offered, now_s, 0, price)
        now_s += price.plain_s
    waited = 0
    while turn(count, offered, now_s, 3, price) != [3] * 8:
        now_s, waited = now_s + price.plain_s, waited + 1
        assert waited * price.plain_s < 10, "seconds"


@pytest.mark.parametrize("limit_s", [8e-3, math.inf])
def test_drafts_come_back_when_steps_with_them_are_no_longer_late(limit_s: float) -> None:
    count, offered, now_s, on_time = AutoCount(64), offers(8), 0.0, [3] * 8
    price = replace(PRICE, num_decoding=8, limit_s=limit_s)

    def step(late_s: float) -> list[int]:
        nonlocal now_s
        counts, is_probe = [0] * 8, False
        if not count.rests():
            counts = count.counts(offered, price, now_s)
            is_probe = count.drafted(sum(counts))
        predicted_s = price.of(sum(counts))
        seconds = predicted_s + (late_s if any(counts) else 0.0)
        count.took(seconds, predicted_s, has_drafts=any(counts), has_prompts=False, is_probe=is_probe)
        now_s += seconds
        return counts

    while step(20e-3) == on_time:
        assert now_s < 1, "seconds"
    began_s, share = now_s, PROBE_SHARE if limit_s == math.inf else LATE_PROBE_SHARE
    late_probes = 0
    while now_s < began_s + 120:
        late_probes += any(step(20e-3)) and now_s > began_s + 60
    assert 2 < late_probes < 2 * share * 60 / 20e-3  # so often as long as it takes them for half as late
    began_s = now_s
    while step(0.0) != on_time:
        assert now_s < began_s + 120, "seconds"


def test_where_nothing_is_drafted_the_number_is_chosen_now_and_then() -> None:
    count, offered = AutoCount(8), offers()
    looks = 0
    for number in range(50 + 10 * LOOK_TURNS):
        if count.rests():
            continue
        looks += number >= 50
        turn_counts = count.counts(offered, PRICE, 0.0)
        count.drafted(sum(turn_counts))
        if any(turn_counts):
            count.verified(offered[0], 0)
    assert looks == 10


def test_steps_with_drafts_that_are_late_are_not_chosen() -> None:
    """Their seconds are measured from step to step: what drafting and waiting for tokens takes is in them."""
    on_time, late = AutoCount(8), AutoCount(8)
    for _ in range(100):
        late.took(20e-3, 5e-3, has_drafts=True, has_prompts=False)
        for count in (on_time, late):
            count.took(4e-3, 4e-3, has_drafts=False, has_prompts=False)
    now_s = 1.0
    assert on_time.counts(offers(), PRICE, now_s) == [3]
    assert late.counts(offers(), PRICE, now_s) == [1]  # a probe
    late.drafted(1)
    late.rests()
    assert late.counts(offers(), PRICE, now_s) == [0]


def test_what_a_grammar_forces_is_drafted_where_guesses_are_wrong() -> None:
    count, offered = AutoCount(8), offers()
    for _ in range(100):
        turn(count, offered, 0.0, 0)
    forced = offered[0]._replace(is_forced=True)
    assert count.counts([forced], PRICE, 0.0) == [3]


@pytest.mark.parametrize(("late_s", "expected"), [(1e-3, 1), (3e-3, 3), (0.0, 0)])
def test_lateness_for_which_the_limit_leaves_room_is_counted_once(late_s: float, expected: int) -> None:
    """Steps with drafts end 1 ms late. The larger of this and of what the limit is lower by is kept free."""
    count, price = AutoCount(64), replace(PRICE, first_s=0.0)
    for _ in range(200):
        count.took(5.1e-3, 4.1e-3, has_drafts=True, has_prompts=False)
        count.took(4e-3, 4e-3, has_drafts=False, has_prompts=False)
    limit_s = price.plain_s + {1e-3: 0.15e-3, 3e-3: 0.35e-3, 0.0: 0.95e-3}[late_s]
    price = replace(price, limit_s=limit_s, late_s=late_s)
    assert sum(between_probes(count, offers(1), price)) == expected


def test_a_fixed_number_is_shared_evenly_within_the_limit() -> None:
    fixed = FixedCount(7)
    assert fixed.counts(offers(3), PRICE, 0.0) == [2, 2, 2]
    assert fixed.counts(offers(2), PRICE, 0.0) == [3, 3]
    assert fixed.counts(offers(9), PRICE, 0.0) == [1] * 7 + [0] * 2
    assert fixed.counts(offers(2), replace(PRICE, limit_s=5.25e-3), 0.0) == [1, 1]
