"""Elastic nodes whose caches are too short for all chats to be in those of the nodes that generate."""

from dataclasses import replace

import pytest

from benchmarks.router.cluster import SimulatedCluster
from benchmarks.router.report import Result
from benchmarks.router.simulate import arrangement
from benchmarks.router.work import NodeShape
from benchmarks.router.workload import Chats, ChatShape
from headrace.cache.checkpoints import checkpoint_policy
from headrace.step_costs import StepCosts
from router.routing.plan import Objectives
from router.routing.policies.by_name import POLICIES

BLOCK_SIZE = 64
CHATS = ChatShape(at_once=32, first=8192, new=512, answer=64, turns=8, total=200)
LIVE_TOKENS = 32 * (8192 + 4 * 576)
COSTS = StepCosts(step_s=0.0021, decode_s=2e-5, context_s=2.8e-9, chunk_s=0.0014, token_s=9e-6, depth_s=1e-10)


def result(nodes: str, chats: ChatShape, *, tokens: int, states: int) -> Result:
    """Of `nodes` that hold so much each."""
    policy = checkpoint_policy("branch")
    node = NodeShape(
        tokens // BLOCK_SIZE, states, BLOCK_SIZE, COSTS, policy, "flop_aware", max_step_tokens=2048, is_hybrid=True
    )
    asked, load = Objectives(token_gap_s=0.01), Chats(chats, BLOCK_SIZE)
    cluster = SimulatedCluster(arrangement(nodes, node), POLICIES["predicted"], load, asked)
    cluster.run()
    return Result.of(cluster, 1.0)


@pytest.mark.parametrize(("tokens", "states"), [(0.6, 4.0), (0.7, 4.0), (0.8, 4.0), (4.0, 0.8)])
def test_elastic_nodes_with_short_caches_do_what_undivided_ones_do(tokens: float, states: float) -> None:
    """One node's cache holds less than the chats at once, by blocks or by slots, both hold more. When roles counted,
    the one that generates had to hold all chats, and they were computed again and again."""
    sizes = {"tokens": int(tokens * LIVE_TOKENS), "states": int(states * CHATS.at_once)}
    half = replace(CHATS, at_once=CHATS.at_once // 2, total=CHATS.total // 2)
    undivided, elastic = result("1", half, **sizes), result("1P1D~", CHATS, **sizes)
    assert elastic.cached_share > undivided.cached_share - 0.02
    assert elastic.requests_per_s > 0.93 * 2 * undivided.requests_per_s


def test_elastic_nodes_with_ample_caches_share_the_work_by_roles() -> None:
    """A tenth more than two undivided ones at this gap."""
    sizes = {"tokens": 2 * LIVE_TOKENS, "states": 4 * CHATS.at_once}
    half = replace(CHATS, at_once=CHATS.at_once // 2, total=CHATS.total // 2)
    undivided, elastic = result("1", half, **sizes), result("1P1D~", CHATS, **sizes)
    assert elastic.requests_per_s > 1.05 * 2 * undivided.requests_per_s


@pytest.mark.parametrize(("tokens", "least"), [(16, 0.97), (24, 1.04), (64, 1.07)])
def test_elastic_nodes_without_room_for_the_requests_under_way_do_what_undivided_ones_do(
    tokens: int, least: float
) -> None:
    """32 prompts at once, none of which comes back, on nodes that hold so many. When roles counted, the requests waited
    for room on the node that generates, half of which was on the other: 0.87 with 16. With 24 roles are worth it."""
    once = replace(CHATS, answer=256, turns=1)
    half = replace(once, at_once=once.at_once // 2, total=once.total // 2)
    sizes = {"tokens": tokens * once.first, "states": 4 * once.at_once}
    undivided, elastic = result("1", half, **sizes), result("1P1D~", once, **sizes)
    assert elastic.requests_per_s > least * 2 * undivided.requests_per_s
