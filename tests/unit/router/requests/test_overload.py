"""A line under three times the load that the places can serve, in simulated time."""

import heapq
import random
from collections.abc import Callable

import pytest

from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from router.errors import ApiError
from router.requests.admission import Admission, AdmissionPermit
from router.requests.wait_estimate import WaitEstimate

PLACES = 8
MEAN_S = 2.0  # capacity: 4 requests a second
TIMEOUT_S = 20.0
LOAD_S = 200.0
REQUEST = Request("r", TokenArray.of((1, 2)), 2, Sampling(max_tokens=4, seed=0))


class Simulation:
    """Requests arrive at a steady rate for `LOAD_S`; each takes its place for `service_s()`."""

    def __init__(self, max_queue: int, service_s: Callable[[], float]) -> None:
        self.now_s = 0.0
        self.admission = Admission(PLACES, max_queue, timeout_s=TIMEOUT_S, clock=lambda: self.now_s)
        self.service_s = service_s
        self.arrived_s: dict[AdmissionPermit, float] = {}
        self.times_s: list[float] = []  # from arrival to end
        self.refused: list[ApiError] = []

    def run(self, rate: float) -> None:
        ends: list[tuple[float, int, AdmissionPermit]] = []
        waiting: list[AdmissionPermit] = []
        arrivals = [index / rate for index in range(int(LOAD_S * rate))]
        while arrivals or ends:
            if arrivals and (not ends or arrivals[0] <= ends[0][0]):
                self.now_s = arrivals.pop(0)
                try:
                    (permit,) = self.admission.acquire("one", [REQUEST])
                except ApiError as error:
                    self.refused.append(error)
                    continue
                self.arrived_s[permit] = self.now_s
                waiting.append(permit)
            else:
                self.now_s, _, permit = heapq.heappop(ends)
                self.times_s.append(self.now_s - self.arrived_s[permit])
                permit.release()
            for permit in [each for each in waiting if each.is_granted]:
                waiting.remove(permit)
                heapq.heappush(ends, (self.now_s + self.service_s(), id(permit), permit))


@pytest.mark.parametrize("max_queue", [16, 1000])
def test_at_three_times_the_capacity_nobody_who_is_admitted_runs_out_of_time(max_queue: int):
    dice = random.Random(0)
    simulation = Simulation(max_queue, lambda: dice.uniform(0.5, 1.5) * MEAN_S)
    simulation.run(rate=3 * PLACES / MEAN_S)
    assert max(simulation.times_s) <= TIMEOUT_S
    assert len(simulation.times_s) >= 0.95 * LOAD_S * PLACES / MEAN_S, "the places must stay busy"
    assert {error.status for error in simulation.refused} == {429}
    assert {error.code for error in simulation.refused} == {"queue_full" if max_queue == 16 else "wait_too_long"}
    assert all(1 <= (error.retry_after_s or 0) <= TIMEOUT_S for error in simulation.refused)


def test_below_the_capacity_nobody_is_refused():
    dice = random.Random(1)
    simulation = Simulation(16, lambda: dice.uniform(0.5, 1.5) * MEAN_S)
    simulation.run(rate=0.8 * PLACES / MEAN_S)
    assert not simulation.refused


def test_a_cluster_that_slows_down_is_noticed_before_a_request_ends():
    simulation = Simulation(1000, lambda: 0.1)
    simulation.run(rate=1.0)
    permits = simulation.admission.acquire("one", [REQUEST] * (PLACES + 1))
    assert permits[0].is_granted
    simulation.now_s += 15.0
    simulation.admission.acquire("one", [REQUEST])
    simulation.now_s += 10.0
    with pytest.raises(ApiError, match="would take about"):
        simulation.admission.acquire("one", [REQUEST])


def test_prompts_that_the_nodes_still_have_to_compute_count():
    estimate = WaitEstimate()
    estimate.ended("one", 2.0)
    assert estimate.wait_s(2, 4, [], nodes_line_s=0.0) == 1.0
    assert estimate.wait_s(2, 4, [], nodes_line_s=30.0) == 45.0


def test_a_few_requests_that_take_all_their_time_keep_nobody_out():
    estimate = WaitEstimate()
    for index in range(60):
        estimate.ended("one", 600.0 if index % 12 == 0 else 2.0)
    assert estimate.usual_s("one", [1.0, 1.0]) == 2.0


def test_a_client_whose_requests_take_all_their_time_keeps_no_other_out():
    now_s = 0.0
    admission = Admission(PLACES, 1000, timeout_s=TIMEOUT_S, clock=lambda: now_s)
    for _ in range(3):
        slow = admission.acquire("slow", [REQUEST] * PLACES)
        now_s += TIMEOUT_S - 0.5
        with pytest.raises(ApiError, match="would take about"):
            admission.acquire("slow", [REQUEST])
        (quick,) = admission.acquire("quick", [REQUEST])
        for permit in slow:
            permit.release()
        assert quick.is_granted
        quick.release()
