import pytest

from headrace.engine.prefill_rate import HALF_LIFE_S, PrefillRate


def measured(*steps: tuple[int, bool, float, float]) -> float:
    """The rate after steps one after another: tokens, whether some were left, began, done."""
    rate = PrefillRate()
    for num_tokens, leaves_some, began_s, done_s in steps:
        rate.done(rate.launched(num_tokens, leaves_some=leaves_some, began_s=began_s), done_s)
    return rate.tokens_per_s


def test_nothing_is_known_at_first_nor_from_short_prompts() -> None:
    assert measured() == 0
    assert measured((5, False, 0.0, 0.1), (7, False, 0.2, 0.3)) == 0


def test_steps_that_leave_prompts_waiting_count_with_all_their_time() -> None:
    assert measured((100, True, 0.0, 1.0), (100, True, 1.0, 2.0)) == pytest.approx(100)


def test_a_measurement_that_was_far_too_low_is_mended_by_short_prompts_alone() -> None:
    """Requests are refused by it, so that no prompts are left waiting any more, and nothing else would be measured."""
    suspended = (1000, True, 0.0, 60.0)
    short = [(200, False, began_s, began_s + 0.1) for began_s in range(100, 400)]
    assert measured(suspended) < 20
    assert 1000 < measured(suspended, *short) <= 2000


def test_time_without_prompts_does_not_count() -> None:
    assert measured((100, True, 0.0, 1.0), (0, False, 1.0, 50.0), (100, True, 60.0, 61.0)) == pytest.approx(100)


def test_overlapped_steps_are_measured_from_one_end_to_the_next() -> None:
    rate = PrefillRate()
    marks = [rate.launched(100, leaves_some=True, began_s=0.0), rate.launched(100, leaves_some=True, began_s=0.01)]
    rate.done(marks[0], 1.0)
    marks.append(rate.launched(100, leaves_some=False, began_s=1.01))
    rate.done(marks[1], 2.0)
    rate.done(marks[2], 3.0)
    assert rate.tokens_per_s == pytest.approx(100)


def test_the_newest_speed_weighs_most() -> None:
    slow, fast = (100 * int(HALF_LIFE_S), True, 0.0, HALF_LIFE_S), (3_000, True, HALF_LIFE_S, 2 * HALF_LIFE_S)
    assert measured(slow, fast) == pytest.approx((500 + 3_000) / (0.5 * HALF_LIFE_S + HALF_LIFE_S))
