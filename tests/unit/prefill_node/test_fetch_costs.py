import pytest

from prefill_node.fetch_costs import MeasuredCosts
from prefill_node.fetch_policy import FetchCosts

START = FetchCosts(prefill_tokens_per_s=5_000.0, bytes_per_s=500e6, latency_s=0.010)


def test_nothing_measured_is_what_it_starts_with() -> None:
    assert MeasuredCosts().now == FetchCosts() == START


def test_what_is_observed_again_and_again_is_what_it_says() -> None:
    costs = MeasuredCosts(START)
    for _ in range(60):
        costs.computed(1_000, seconds=0.1)
        costs.fetched(1_000_000, moving_s=0.01, seconds=0.03)
    assert costs.now.prefill_tokens_per_s == pytest.approx(10_000, rel=1e-3)
    assert costs.now.bytes_per_s == pytest.approx(100e6, rel=1e-3)
    assert costs.now.latency_s == pytest.approx(0.020, rel=1e-3)


def test_one_observation_moves_an_average_by_a_fifth() -> None:
    costs = MeasuredCosts(START)
    costs.fetched(50_000_000, moving_s=0.1, seconds=0.210)  # as fast as assumed, 100 ms later
    assert costs.now.bytes_per_s == pytest.approx(500e6)
    assert costs.now.latency_s == pytest.approx(0.8 * 0.010 + 0.2 * 0.110)


def test_a_long_prefill_counts_for_more_than_a_short_one() -> None:
    costs = MeasuredCosts(START)
    for _ in range(60):
        costs.computed(10_000, seconds=1.0)
        costs.computed(100, seconds=0.1)
    assert costs.now.prefill_tokens_per_s == pytest.approx(10_100 / 1.1, rel=0.05)


def test_a_prefill_of_a_few_tokens_says_nothing_of_their_speed() -> None:
    costs = MeasuredCosts(START)
    costs.computed(63, seconds=1.0)
    assert costs.now == START


def test_a_failed_fetch_is_time_that_the_request_waited() -> None:
    costs = MeasuredCosts(START)
    costs.failed(5.0)
    assert costs.now.latency_s == pytest.approx(0.8 * 0.010 + 0.2 * 5.0)
    assert costs.now.bytes_per_s == START.bytes_per_s


def test_a_fetch_that_fails_at_once_says_nothing_of_what_fetches_take() -> None:
    costs = MeasuredCosts(START)
    for _ in range(100):
        costs.failed(0.0)
        costs.failed(0.9 * START.latency_s)
    assert costs.now == START
    costs.failed(5.0)
    slower = costs.now.latency_s
    costs.failed(0.001)
    assert costs.now.latency_s == slower > START.latency_s


def test_declined_fetches_are_tried_again_some_day() -> None:
    costs = MeasuredCosts(START)
    costs.failed(5.0)
    costs.fetched(1_000, moving_s=5.0, seconds=5.0)
    declined = 0
    while costs.now.fetch_s(1_000_000) > 1.5 * START.fetch_s(1_000_000):
        costs.declined()
        declined += 1
    assert 20 < declined < 200
    assert costs.now.latency_s >= START.latency_s and costs.now.bytes_per_s <= START.bytes_per_s
