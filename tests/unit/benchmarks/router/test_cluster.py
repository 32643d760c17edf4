"""The simulated cluster: every request ends once, caches stay sound, and hits are those of the real cache code."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.router.cluster import SimulatedCluster
from benchmarks.router.report import Result
from benchmarks.router.simulate import Setting, arrangement, simulate
from benchmarks.router.work import NodeShape
from benchmarks.router.workload import TRACE_BLOCK_TOKENS, Chats, ChatShape, MooncakeTrace
from headrace.cache.checkpoints import checkpoint_policy
from headrace.step_costs import StepCosts
from router.routing.candidates import Candidate
from router.routing.plan import Objectives, Plan, RoutedRequest
from router.routing.policies.by_name import POLICIES

B = TRACE_BLOCK_TOKENS
CHATS = ChatShape(at_once=6, first=1024, new=256, answer=64, turns=3, total=30)


def shape(block_size: int, *, is_hybrid: bool, size: int = 60) -> NodeShape:
    policy = checkpoint_policy("branch" if is_hybrid else "none")
    return NodeShape(size, size, block_size, StepCosts(), policy, "lru", max_step_tokens=2048, is_hybrid=is_hybrid)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Five pairs of a prompt and its next turn, each pair far from the others, the first turns a second apart."""
    lines = []
    for pair in range(5):
        ids = [10 * pair + i for i in range(7)]
        lines.append({"timestamp": 1000 * pair, "input_length": 4 * B + 10, "output_length": 20, "hash_ids": ids[:5]})
        later = {"timestamp": 1000 * pair + 5500, "input_length": 6 * B, "output_length": 20}
        lines.append({**later, "hash_ids": ids[:4] + ids[5:]})
    path = tmp_path / "pairs_trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("nodes", ["1", "3", "2P2D", "1P1D1"])
@pytest.mark.parametrize("is_hybrid", [False, True])
def test_every_request_ends_once_and_nothing_stays_behind(policy: str, nodes: str, is_hybrid: bool) -> None:
    cluster = SimulatedCluster(arrangement(nodes, shape(64, is_hybrid=is_hybrid)), POLICIES[policy], Chats(CHATS, 64))
    cluster.run()
    turns = [(outcome.arrival.chat, outcome.arrival.turn) for outcome in cluster.outcomes]
    assert sorted(turns) == [(chat, turn) for chat in range(30) for turn in range(3)]
    for outcome in cluster.outcomes:
        assert outcome.arrival.at_s < outcome.first_s <= outcome.decoding_s <= outcome.end_s
        assert 0 < outcome.computed_tokens <= outcome.arrival.num_tokens
    for node in cluster.nodes:
        stats = node.cache.stats()
        assert stats.blocks.in_use == stats.slots.in_use == 0
        node.cache.check()


def test_later_turns_resume_on_a_node_that_computed_the_one_before() -> None:
    for is_hybrid in (False, True):
        ample = shape(64, is_hybrid=is_hybrid, size=1000)
        one = SimulatedCluster(arrangement("1", ample), POLICIES["dynamo"], Chats(CHATS, 64))
        one.run()
        computed = {each.arrival.turn: each.computed_tokens for each in one.outcomes if each.arrival.chat == 29}
        assert computed[0] == 1024
        assert computed[1] == computed[2] <= 256 + 64


def test_a_gap_asked_for_has_first_tokens_wait_for_the_second() -> None:
    """What is handed over has no gap behind its first token then, and the first token comes later by it."""

    def result(gap_s: float | None) -> Result:
        nodes, asked = arrangement("1P1D", shape(64, is_hybrid=True, size=1000)), Objectives(token_gap_s=gap_s)
        cluster = SimulatedCluster(nodes, POLICIES["predicted"], Chats(CHATS, 64), asked)
        cluster.run()
        return Result.of(cluster, 1.0)

    plain, held = result(None), result(1.0)
    assert held.gaps.p99 < 0.8 * plain.gaps.p99
    assert held.later_turns.p50 - plain.later_turns.p50 == pytest.approx(plain.gaps.p99, rel=0.3)


def test_later_turns_name_their_time_to_the_first_token_beside_the_clusters_gap() -> None:
    named: dict[bool, set[Objectives]] = defaultdict(set)  # by whether it is a later turn

    class Noting:
        def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan | None:
            named[request.num_tokens > CHATS.first].add(request.objectives)
            return POLICIES["predicted"].choose(request, candidates)

    asked, chats = Objectives(token_gap_s=0.01), Chats(replace(CHATS, later_first_token_s=0.3), 64)
    SimulatedCluster(arrangement("1P1D", shape(64, is_hybrid=True)), Noting(), chats, asked).run()
    assert named == {False: {asked}, True: {Objectives(first_token_s=0.3, token_gap_s=0.01)}}


def test_hits_of_a_trace_are_predicted_and_served(trace: Path) -> None:
    found = 5 * 4 * B / (5 * (4 * B + 10) + 5 * 6 * B)
    result = simulate(Setting("2", "dynamo_tuned", trace))
    assert result.cached_share == pytest.approx(found)
    assert (result.foreseen_share, result.requests, result.refused) == (1.0, 10, 0)
    # The fifth pair's second turn is the tenth request, its first the fifth: turns about even nodes hit none.
    assert simulate(Setting("2", "round_robin", trace)).cached_share < found


def test_a_faster_trace_comes_sooner(trace: Path) -> None:
    at_s = [[each.at_s for each in MooncakeTrace.read(trace, speed).rows] for speed in (1.0, 2.0)]
    assert at_s[0] == [2 * each for each in at_s[1]]


def test_a_steady_part_leaves_out_the_first_chats_and_the_last() -> None:
    cluster = SimulatedCluster(arrangement("2", shape(64, is_hybrid=True)), POLICIES["dynamo"], Chats(CHATS, 64))
    cluster.run()
    part = cluster.workload.steady_part(cluster.events.now_s)
    assert 0 < part.start_s < part.end_s < cluster.events.now_s
    assert 0 < Result.of(cluster, cpu_s=1.0).requests < len(cluster.outcomes)


def test_requests_at_the_edges_of_the_steady_part_count_by_their_share_of_time_in_it() -> None:
    """A closed loop answers as many requests a second as it has at once, by the time of one (Little's law)."""
    for total in (24, 27, 30):  # the last wave is whole, or a part of one
        chats = Chats(ChatShape(at_once=6, first=64, new=0, answer=500, turns=1, total=total), 64)
        cluster = SimulatedCluster(arrangement("1", shape(64, is_hybrid=True)), POLICIES["dynamo"], chats)
        cluster.run()
        part = chats.steady_part(cluster.events.now_s)
        inside = [each for each in cluster.outcomes if part.start_s < each.end_s and each.arrival.at_s < part.end_s]
        time_s = sum(each.end_s - each.arrival.at_s for each in inside) / len(inside)
        assert Result.of(cluster, cpu_s=1.0).requests_per_s == pytest.approx(6 / time_s, rel=0.02)


def test_nodes_are_a_number_or_of_each_role() -> None:
    nodes = arrangement("2P1D3", shape(64, is_hybrid=False))
    assert (nodes.prefill, nodes.decode, nodes.both) == (2, 1, 3)
    for wrong in ("", "4D", "PD", "x"):
        with pytest.raises(ValueError, match="4P4D"):
            arrangement(wrong, shape(64, is_hybrid=False))
