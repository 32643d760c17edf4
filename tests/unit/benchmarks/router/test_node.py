"""A simulated node: its steps take what the costs say, however many of them are one event."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.router.cluster import Arrangement, SimulatedCluster
from benchmarks.router.drafts import Drafts
from benchmarks.router.report import Result
from benchmarks.router.work import NodeShape
from benchmarks.router.workload import Arrival, MooncakeTrace
from headrace.cache.checkpoints import checkpoint_policy
from headrace.cache.types import PrefixKey
from headrace.step_costs import TIMED_STEPS, StepCosts, StepShape
from router.routing.candidates import Candidate, LinkCosts
from router.routing.plan import Objectives, Plan, RoutedRequest
from router.routing.policies.round_robin import RoundRobin

COSTS = StepCosts()
SHAPE = NodeShape(64, 64, 512, COSTS, checkpoint_policy("none"), "lru", max_step_tokens=2048, is_hybrid=False)
LINK = LinkCosts(latency_s=0.5, bytes_per_s=1e9)


def arrival(at_s: float, num_tokens: int, answer_tokens: int) -> Arrival:
    """A prompt like no other."""
    keys = [PrefixKey(f"{at_s} {index}".encode()) for index in range(num_tokens // 512)]
    return Arrival(at_s, num_tokens, answer_tokens, keys, chat=0)


def run(*arrivals: Arrival, prefill: int = 0, shape: NodeShape = SHAPE, gap_s: float | None = None) -> SimulatedCluster:
    nodes = Arrangement(1 - prefill, prefill, prefill, shape=shape, link=LINK)
    cluster = SimulatedCluster(nodes, RoundRobin(), MooncakeTrace("few", arrivals), Objectives(token_gap_s=gap_s))
    cluster.run()
    return cluster


def decode_s(*contexts: float) -> float:
    return COSTS.seconds(StepShape(num_decoding=len(contexts), context_tokens=sum(contexts)))


def test_a_lone_request_takes_its_chunks_and_its_steps() -> None:
    (outcome,) = run(arrival(1.0, 3000, 50)).outcomes
    assert outcome.first_s - 1.0 == pytest.approx(COSTS.prefill_s(0, 3000, chunk_tokens=2048))
    assert outcome.end_s - outcome.first_s == pytest.approx(sum(decode_s(3001 + i) for i in range(49)))
    assert outcome.computed_tokens == 3000


def test_a_step_with_drafts_gives_as_many_tokens_as_are_right_on_average() -> None:
    shape = replace(SHAPE, drafts=Drafts((1.0, 0.5)))
    cluster = run(arrival(0, 100, 51), shape=shape)
    (outcome,), (node,) = cluster.outcomes, cluster.nodes
    assert node.counted["drafted_tokens"] == 2 * node.counted["draft_steps"] == 2 * 50 / 2.5
    assert node.counted["accepted_tokens"] == 50 - 20
    drafted_s = [decode_s(101 + 2.5 * step) + COSTS.draft_part_s(2) for step in range(20)]
    assert outcome.end_s - outcome.first_s == pytest.approx(sum(drafted_s))


def test_contexts_end_with_their_answers_wherever_their_last_step_went() -> None:
    shape = replace(SHAPE, drafts=Drafts((0.9, 0.8, 0.6)))
    cluster = run(*(arrival(0.003 * i, 100 + i, 20 + 7 * i) for i in range(12)), shape=shape)
    (node,) = cluster.nodes
    assert node._context_tokens == 0
    assert 2.5 < Result.of(cluster, cpu_s=1.0).tokens_a_step < 3.3, "without drafts where prompts wait"


def test_drafts_that_are_never_right_are_not_made() -> None:
    plain, drafting = (
        run(arrival(0, 100, 50), shape=replace(SHAPE, drafts=drafts)) for drafts in (Drafts(), Drafts((0.01, 0.0)))
    )
    assert plain.outcomes[0].end_s == drafting.outcomes[0].end_s


def test_a_gap_leaves_drafts_and_prompts_what_it_has() -> None:
    shape = replace(SHAPE, costs=replace(COSTS, decode_s=300e-6), drafts=Drafts((0.9, 0.8)))
    arrivals = [*(arrival(0.001 * i, 100, 200) for i in range(20)), arrival(0.1, 20_000, 1)]
    wide, narrow = (run(*arrivals, shape=shape, gap_s=gap_s) for gap_s in (0.02, decode_s(101) + 0.5e-3))
    assert wide.nodes[0].counted["drafted_tokens"] > 0 == narrow.nodes[0].counted["drafted_tokens"]
    steps = wide.nodes[0].strides
    longest_s = max(seconds / num for seconds, num in zip(steps.seconds, steps.steps, strict=True))
    assert 0.018 < longest_s < 0.02, "prompts fill what drafts leave"


def test_a_first_token_that_waits_for_the_second_waits_for_a_whole_step_with_drafts() -> None:
    cluster = run(arrival(0, 100, 51), prefill=1, shape=replace(SHAPE, drafts=Drafts((1.0, 0.5))), gap_s=0.1)
    shown_s = cluster.outcomes[0].decoding_s + decode_s(101) + COSTS.draft_part_s(2)
    assert Result.of(cluster, cpu_s=1.0).first.p50 == pytest.approx(shown_s, rel=1e-4)


def test_drafts_leave_room_for_the_answers_and_a_prompt_in_small_steps() -> None:
    shape = replace(SHAPE, max_step_tokens=128, drafts=Drafts((0.9, 0.8, 0.7)))
    cluster = run(*(arrival(0.001 * i, 40, 60) for i in range(50)), shape=shape)
    assert cluster.nodes[0].counted["draft_steps"] > 0


def test_a_node_reports_what_it_has_sampled_before_it_has_any() -> None:
    assert run().nodes[0].counted.keys() >= {"sampled_tokens", TIMED_STEPS}


def test_a_prompt_that_arrives_within_a_step_waits_for_its_end() -> None:
    lone = run(arrival(0, 100, 20)).outcomes[0]
    third_step_s = lone.first_s + decode_s(101) + decode_s(102)
    cluster = run(arrival(0, 100, 20), arrival(third_step_s + 0.0001, 1000, 1))
    first, second = cluster.outcomes
    began_s = third_step_s + decode_s(103)
    mixed_s = COSTS.seconds(StepShape(1, 104) + StepShape.prefill(0, 1000))
    assert second.first_s == pytest.approx(began_s + mixed_s)
    assert first.end_s == pytest.approx(lone.end_s + mixed_s - decode_s(104))
    assert cluster.nodes[0].strides.tokens == [3, 1, 15]


def test_a_sequence_that_lands_decodes_from_the_next_step_on() -> None:
    lone = run(arrival(0, 100, 1000), prefill=1).outcomes[0]
    assert lone.decoding_s - lone.first_s == pytest.approx(LINK.seconds(100 * SHAPE.bytes_per_token))
    cluster = run(arrival(0, 100, 1000), arrival(0.1, 100, 10), prefill=1)
    second = cluster.outcomes[1]
    landed_s = second.first_s + LINK.seconds(100 * SHAPE.bytes_per_token)
    assert landed_s < second.decoding_s < landed_s + decode_s(600)
    steps = cluster.nodes[0].strides
    assert steps.batch == [1, 2, 1]
    assert sum(steps.tokens[1:2]) == 9
    assert sum(steps.tokens) == 999


def test_the_longest_gap_of_a_handed_over_request_is_its_hand_over() -> None:
    result = Result.of(run(arrival(0, 100, 5), prefill=1), cpu_s=1.0)
    assert result.goodput == [0.0, 0.0, 0.0]
    assert Result.of(run(arrival(0, 100, 5)), cpu_s=1.0).goodput == [1.0, 1.0, 1.0]


def test_requests_wait_for_room_in_the_cache() -> None:
    cluster = run(*(arrival(0.001 * i, 20_000, 100) for i in range(3)))
    firsts = [outcome.first_s for outcome in cluster.outcomes]
    assert firsts[1] > cluster.outcomes[0].end_s
    assert firsts[2] > cluster.outcomes[1].end_s


class Crossed:
    """Leaves the first two requests to a node each, and hands every other one of the rest over the other way round; the
    node that is left for one that comes again does all."""

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan:
        if request.number < 2 or len(candidates) == 1:
            alone = candidates[request.number % len(candidates)]
            return Plan(alone.name, alone.name)
        first, second = candidates if request.number % 2 else reversed(candidates)
        return Plan(first.name, second.name)


def test_nodes_that_wait_for_each_other_give_their_reservations_back() -> None:
    nodes = Arrangement(2, shape=SHAPE, link=LINK)
    # The second ends first, so that the newer one of the next two gets its reservation before the older one.
    arrivals = [arrival(0.001 * i, 20_000, 9 if i else 500) for i in range(6)]
    cluster = SimulatedCluster(nodes, Crossed(), MooncakeTrace("few", arrivals))
    cluster.run()
    assert all(outcome.end_s > outcome.first_s > 0 for outcome in cluster.outcomes)
    assert cluster.num_decisions > len(cluster.outcomes)


def test_a_short_prompt_does_not_wait_until_a_full_cache_has_room_for_long_ones() -> None:
    arrivals = [arrival(0.001 * i, 20_000 if i < 6 else 1000, 200) for i in range(7)]
    outcomes = run(*arrivals).outcomes
    assert outcomes[6].first_s < outcomes[1].first_s
    assert [each.first_s for each in outcomes[:6]] == sorted(each.first_s for each in outcomes[:6])
