import pytest

from node_runtime.fetch_costs import MeasuredFetches
from node_runtime.fetch_policy import FetchCosts

START = FetchCosts(bytes_per_s=500e6, latency_s=0.010)


def test_nothing_measured_is_what_it_starts_with() -> None:
    assert MeasuredFetches().now == FetchCosts() == START


def test_what_is_observed_again_and_again_is_what_it_says() -> None:
    costs = MeasuredFetches(START)
    for _ in range(60):
        costs.fetched(1_000_000, moving_s=0.01, seconds=0.03)
    assert costs.now.bytes_per_s == pytest.approx(100e6, rel=1e-3)
    assert costs.now.latency_s == pytest.approx(0.020, rel=1e-3)


def test_one_observation_moves_an_average_by_a_fifth() -> None:
    costs = MeasuredFetches(START)
    costs.fetched(50_000_000, moving_s=0.1, seconds=0.210)  # as fast as assumed, 100 ms later
    assert costs.now.bytes_per_s == pytest.approx(500e6)
    assert costs.now.latency_s == pytest.approx(0.8 * 0.010 + 0.2 * 0.110)


def test_a_failed_fetch_is_time_that_the_request_waited() -> None:
    costs = MeasuredFetches(START)
    costs.failed(5.0)
    assert costs.now.latency_s == pytest.approx(0.8 * 0.010 + 0.2 * 5.0)
    assert costs.now.bytes_per_s == START.bytes_per_s


def test_a_fetch_that_fails_at_once_says_nothing_of_what_fetches_take() -> None:
    costs = MeasuredFetches(START)
    for _ in range(100):
        costs.failed(0.0)
        costs.failed(0.9 * START.latency_s)
    assert costs.now == START
    costs.failed(5.0)
    slower = costs.now.latency_s
    costs.failed(0.001)
    assert costs.now.latency_s == slower > START.latency_s


def test_the_link_says_what_fetches_take_until_one_has_shown_it() -> None:
    costs = MeasuredFetches(START)
    costs.link_measured(10e9)
    assert costs.now == FetchCosts(bytes_per_s=pytest.approx(10e9), latency_s=START.latency_s)
    costs.fetched(100_000_000, moving_s=0.1, seconds=0.11)
    slower = costs.now.bytes_per_s
    assert slower < 10e9
    costs.link_measured(10e9)
    assert costs.now.bytes_per_s == slower
    for _ in range(200):
        costs.declined()
    assert costs.now.bytes_per_s == pytest.approx(10e9, rel=0.01), "it is tried again some day, at the link's speed"


def test_declined_fetches_are_tried_again_some_day() -> None:
    costs = MeasuredFetches(START)
    costs.failed(5.0)
    costs.fetched(1_000, moving_s=5.0, seconds=5.0)
    declined = 0
    while costs.now.fetch_s(1_000_000) > 1.5 * START.fetch_s(1_000_000):
        costs.declined()
        declined += 1
    assert 20 < declined < 200
    assert costs.now.latency_s >= START.latency_s and costs.now.bytes_per_s <= START.bytes_per_s
