"""Hosts in the simulator: steps launched ahead, orders obeyed once a turn, and devices that wait for a late host."""

import statistics
from dataclasses import replace

import pytest

from benchmarks.router.cluster import Arrangement, SimulatedCluster
from benchmarks.router.host import MEASURED_HOST, NO_HOST, HostCosts
from benchmarks.router.report import Result
from benchmarks.router.simulate import arrangement
from benchmarks.router.work import NodeShape
from benchmarks.router.workload import Arrival, Chats, ChatShape, MooncakeTrace
from headrace.cache.checkpoints import checkpoint_policy
from headrace.cache.types import PrefixKey
from headrace.step_costs import StepCosts
from router.routing.candidates import LinkCosts
from router.routing.plan import Objectives
from router.routing.policies.by_name import POLICIES
from router.routing.policies.round_robin import RoundRobin

COSTS = StepCosts(step_s=0.01, decode_s=0.0, context_s=0.0, chunk_s=0.1, token_s=0.0, depth_s=0.0)
"""A step takes 10 ms for answers, and 100 for prompts."""
AHEAD = HostCosts(launches_ahead=True)
LINK = LinkCosts(latency_s=0.001, bytes_per_s=1e12)


def arrival(at_s: float, answer_tokens: int, num_tokens: int = 100) -> Arrival:
    keys = [PrefixKey(f"{at_s} {index}".encode()) for index in range(num_tokens // 64)]
    return Arrival(at_s, num_tokens, answer_tokens, keys, chat=0)


def run(
    host: HostCosts, *arrivals: Arrival, prefill: int = 0, costs: StepCosts = COSTS, seed: int = 0
) -> SimulatedCluster:
    shape = NodeShape(256, 64, 512, costs, checkpoint_policy("none"), "lru", is_hybrid=False, host=host)
    nodes = Arrangement(1 - prefill, prefill, prefill, shape=shape, link=LINK)
    cluster = SimulatedCluster(nodes, RoundRobin(), MooncakeTrace("few", arrivals), seed=seed)
    cluster.run()
    return cluster


def test_a_host_that_costs_nothing_delays_no_lone_request() -> None:
    plain, ahead = (run(host, arrival(0.0, 50)).outcomes[0] for host in (NO_HOST, AHEAD))
    assert (ahead.first_s, ahead.end_s) == pytest.approx((plain.first_s, plain.end_s))
    assert ahead.first_s == pytest.approx(0.1)
    assert ahead.end_s == pytest.approx(0.1 + 49 * 0.01)


def test_a_prompt_waits_for_the_step_under_way_and_for_the_one_launched_behind_it() -> None:
    arrivals = arrival(0.0, 50), arrival(0.125, 1)  # within the third step of the first one's answer
    plain, ahead = (run(host, *arrivals).outcomes[1].first_s for host in (NO_HOST, AHEAD))
    assert plain == pytest.approx(0.13 + 0.11)
    assert ahead == pytest.approx(0.14 + 0.11)


def test_a_step_behind_prompts_alone_takes_what_comes_until_it_must_be_made() -> None:
    arrivals = arrival(0.0, 1, 20_000), arrival(0.05, 1)  # three steps of 8,192 tokens
    closed, left_open = (run(replace(AHEAD, leaves_open=each), *arrivals).outcomes[1].first_s for each in (False, True))
    assert closed == pytest.approx(0.3)
    assert left_open == pytest.approx(0.2)


def test_a_device_waits_for_a_host_that_is_late() -> None:
    late = run(replace(AHEAD, answer_s=0.03), arrival(0.0, 50)).outcomes[0]
    assert (late.end_s - late.first_s) / 49 == pytest.approx(0.03, rel=0.02)
    hidden = run(replace(AHEAD, answer_s=0.008), arrival(0.0, 50)).outcomes[0]
    assert (hidden.end_s - hidden.first_s) / 49 == pytest.approx(0.01, rel=0.02)


def test_steps_with_prompts_beside_answers_are_late_at_random() -> None:
    """On average they take what is predicted, and 95 of 100 at most as much longer as the node says."""
    arrivals = arrival(0.0, 9000), *(arrival(0.15 * n, 1) for n in range(1, 400))

    def mixed_steps(seed: int) -> list[float]:
        log = run(NO_HOST, *arrivals, costs=replace(COSTS, late_s=0.02), seed=seed).nodes[0].strides
        return [each for tokens, each in zip(log.tokens, log.seconds, strict=True) if each > 0.02 * tokens]

    steps = mixed_steps(0)
    assert len(steps) == 399
    assert statistics.fmean(steps) == pytest.approx(0.11, abs=0.002)
    assert sum(seconds <= 0.13 for seconds in steps) / len(steps) == pytest.approx(0.95, abs=0.03)
    assert mixed_steps(0) == steps != mixed_steps(1)


def test_a_request_taken_in_makes_a_gap_of_those_that_decode() -> None:
    host = replace(AHEAD, request_s=0.2)
    arrivals = arrival(0.0, 50), arrival(0.4, 1)
    cluster = run(host, *arrivals)
    log = cluster.nodes[0].strides
    gaps = [seconds / tokens for seconds, tokens in zip(log.seconds, log.tokens, strict=True)]
    assert max(gaps) == pytest.approx(0.2, rel=0.02)


def test_a_decode_node_reserves_and_begins_an_answer_in_its_turns() -> None:
    """The second prompt arrives while the first one's answer is in a step, and lands in another."""
    arrivals = arrival(0.0, 200), arrival(0.3049, 2)
    plain, ahead = (run(host, *arrivals, prefill=1) for host in (NO_HOST, AHEAD))
    for cluster, launched_ahead_s in ((plain, 0.0), (ahead, 0.01)):
        first, second = cluster.outcomes
        into_step_s = (second.decoding_s - first.decoding_s) % 0.01
        assert min(into_step_s, 0.01 - into_step_s) == pytest.approx(0.0, abs=1e-9)
        assert 0 <= second.decoding_s - (second.first_s + LINK.latency_s) - launched_ahead_s < 0.0101
    assert plain.outcomes[1].first_s - 0.3049 == pytest.approx(0.1)
    assert 0.1 < ahead.outcomes[1].first_s - 0.3049 < 0.1101


def test_a_router_takes_its_time() -> None:
    assert run(HostCosts(router_s=0.025), arrival(1.0, 5)).outcomes[0].first_s == pytest.approx(1.125)


def test_a_turn_costs_nothing_where_nothing_is_launched_ahead() -> None:
    with pytest.raises(ValueError, match="launches_ahead is False"):
        HostCosts(answer_s=1e-3)


@pytest.mark.parametrize("nodes", ["1", "3", "2P2D", "2P2D~"])
@pytest.mark.parametrize("size", [60, 1000])
def test_every_request_ends_once_with_hosts_too(nodes: str, size: int) -> None:
    shape = NodeShape(size, size, 64, StepCosts(), checkpoint_policy("branch"), "lru", 2048, host=MEASURED_HOST)
    chats = ChatShape(at_once=6, first=1024, new=256, answer=64, turns=3, total=30)
    cluster = SimulatedCluster(
        arrangement(nodes, shape), POLICIES["predicted"], Chats(chats, 64), Objectives(token_gap_s=0.01)
    )
    cluster.run()
    turns = [(outcome.arrival.chat, outcome.arrival.turn) for outcome in cluster.outcomes]
    assert sorted(turns) == [(chat, turn) for chat in range(30) for turn in range(3)]
    for outcome in cluster.outcomes:
        assert outcome.arrival.at_s + MEASURED_HOST.router_s < outcome.first_s <= outcome.decoding_s <= outcome.end_s
    for node in cluster.nodes:
        stats = node.cache.stats()
        assert stats.blocks.in_use == stats.slots.in_use == 0
        node.cache.check()
    result = Result.of(cluster, 1.0)
    assert 0 < result.gaps.p50 < result.gaps.p99
