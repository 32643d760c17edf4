"""The planner of roles: one node at a time changes over to where work is left lying."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from benchmarks.router.cluster import Arrangement, SimulatedCluster
from benchmarks.router.node import NodeShape
from benchmarks.router.workload import Arrival, MooncakeTrace
from headrace.cache.checkpoints import checkpoint_policy
from headrace.cache.types import PrefixKey
from headrace.step_costs import StepCosts
from headrace.wire.node_messages import NodeStatus, PoolStatus, Role
from router.routing.policies.predicted import Predicted
from router.routing.role_planner import LEAST_SAMPLES, RolePlanner, RoleUse, plan_roles, use_now

Nodes = dict[str, tuple[Role, NodeStatus]]
WINDOW_S = 10.0


def status(*, slots: int = 0, blocks: int = 0, waiting_tokens: int = 0, requests: int = 0) -> NodeStatus:
    return NodeStatus(
        requests,
        0,
        PoolStatus(100, 100 - blocks, 0, blocks, 0),
        PoolStatus(20, 20 - slots, 0, slots, 0),
        waiting_tokens=waiting_tokens,
    )


BUSY, IDLE = status(waiting_tokens=900, requests=4), status()
FULL, SPARE = status(slots=20), status(slots=4)


def nodes(prefill: list[NodeStatus], decode: list[NodeStatus]) -> Nodes:
    return {f"p{i}": (Role.PREFILL, each) for i, each in enumerate(prefill)} | {
        f"d{i}": (Role.DECODE, each) for i, each in enumerate(decode)
    }


def test_prefill_nodes_are_used_while_they_have_prompts_and_decode_nodes_by_their_fuller_pool() -> None:
    assert use_now(nodes([BUSY, IDLE], [IDLE])) == RoleUse(0.5, 0.0)
    assert use_now(nodes([IDLE], [FULL, SPARE])) == RoleUse(0.0, 0.6)
    assert use_now(nodes([IDLE], [status(slots=1, blocks=80)])).decode == 0.8
    assert use_now({"n0": (Role.BOTH, BUSY)}) == RoleUse(0.0, 0.0)


def test_room_held_for_prompts_that_wait_elsewhere_is_no_decoding() -> None:
    waiting = status(waiting_tokens=9000, requests=16)
    assert use_now(nodes([waiting], [FULL])).decode == pytest.approx(0.2)
    assert use_now(nodes([status(waiting_tokens=9000, requests=99)], [FULL])).decode == 0.0


def test_the_least_used_node_of_the_other_role_changes_over() -> None:
    change = plan_roles(RoleUse(0.95, 0.3), nodes([BUSY], [SPARE, IDLE]))
    assert change is not None
    assert (change.node, change.role) == ("d1", Role.PREFILL)
    assert "95%" in change.reason and "60%" in change.reason
    change = plan_roles(RoleUse(0.3, 0.95), nodes([BUSY, IDLE], [FULL]))
    assert change is not None
    assert (change.node, change.role) == ("p1", Role.DECODE)


@pytest.mark.parametrize("use", [RoleUse(0.9, 0.1), RoleUse(0.95, 0.36), RoleUse(1.0, 1.0), RoleUse(0.1, 0.1)])
def test_roles_stay_while_nobody_is_short_or_the_others_cannot_spare_one(use: RoleUse) -> None:
    assert plan_roles(use, nodes([BUSY, BUSY], [SPARE, SPARE])) is None


def test_one_node_of_each_role_always_stays() -> None:
    assert plan_roles(RoleUse(1.0, 0.0), nodes([BUSY] * 3, [IDLE])) is None
    assert plan_roles(RoleUse(0.0, 1.0), nodes([IDLE], [FULL] * 3)) is None


def test_a_whole_window_must_ask_for_a_change_and_passes_before_the_next() -> None:
    planner, cluster = RolePlanner(WINDOW_S), nodes([BUSY], [IDLE] * 4)
    changes = [now_s for now_s in range(0, 40, 2) if planner.sample(float(now_s), cluster) is not None]
    assert changes == [10, 20, 30]


def test_an_odd_moment_changes_no_role() -> None:
    planner, calm, odd = RolePlanner(WINDOW_S), nodes([IDLE], [IDLE] * 2), nodes([BUSY], [IDLE] * 2)
    assert not any(planner.sample(2.0 * i, odd if i % 5 == 4 else calm) for i in range(50))
    rare = RolePlanner(WINDOW_S)
    assert not any(rare.sample(9.0 * i, odd) for i in range(LEAST_SAMPLES))


# ------------------------------------------------------------ a load that changes its nature, simulated

SLOW = StepCosts(*(8 * each for each in astuple(StepCosts())))
"""A few requests keep such nodes busy for minutes."""

SHAPE = NodeShape(600, 40, 512, SLOW, checkpoint_policy("none"), "lru", is_hybrid=False)
NUM_LONG, DECODES_BEGIN_S = 50, 90.0


def burst(begin_s: float, count: int, each_s: float, num_tokens: int, answer_tokens: int) -> list[Arrival]:
    """Requests with prompts like no other."""
    return [
        Arrival(
            begin_s + each_s * i,
            num_tokens,
            answer_tokens,
            [PrefixKey(f"{begin_s} {i} {k}".encode()) for k in range(num_tokens // 512)],
            chat=0,
        )
        for i in range(count)
    ]


def served(role_window_s: float | None) -> SimulatedCluster:
    heavy = burst(0.0, NUM_LONG, 0.8, 30_000, 50) + burst(DECODES_BEGIN_S, 500, 0.25, 1_000, 1_000)
    nodes = Arrangement(0, 2, 2, shape=SHAPE, role_window_s=role_window_s)
    cluster = SimulatedCluster(nodes, Predicted(), MooncakeTrace("changing", heavy))
    cluster.run()
    return cluster


def test_a_load_that_changes_its_nature_is_done_sooner_with_the_planner() -> None:
    fixed, planned = served(None), served(WINDOW_S)
    assert {change.role for _, change in planned.role_changes} == {Role.PREFILL, Role.DECODE}

    def done_s(cluster: SimulatedCluster, part: slice) -> float:
        return max(outcome.end_s for outcome in cluster.outcomes[part])

    long, short = slice(NUM_LONG), slice(NUM_LONG, None)
    assert done_s(planned, long) < 0.85 * done_s(fixed, long)
    assert done_s(planned, short) - DECODES_BEGIN_S < 0.85 * (done_s(fixed, short) - DECODES_BEGIN_S)
