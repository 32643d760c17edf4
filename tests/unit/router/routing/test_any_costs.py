"""Costs that a node's fit may have, zeros among them: its heartbeats are taken, and requests get plans."""

import math
from dataclasses import fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.hashing import prefix_keys
from headrace.step_costs import PROMPT_SECONDS, TIMED_STEPS, StepCosts
from headrace.wire.node_messages import LinkStatus, NodeStatus, Role
from router.cluster.cluster_index import ClusterIndex
from router.routing.ledger import Ledger
from router.routing.plan import Objectives, RoutedRequest
from router.routing.policies.by_name import POLICIES
from router.routing.snapshots import Snapshots
from tests.support.router.fake_nodes import node_info, node_status

ROLES = {"b0": Role.BOTH, "d0": Role.DECODE, "p0": Role.PREFILL}
KEYS = {16: prefix_keys(range(64), 16)}
LONG = 20_000

COSTS = st.builds(
    StepCosts, **{each.name: st.sampled_from((0.0, 1e-15, each.default, 1.0)) for each in fields(StepCosts)}
)
COUNTERS = ("sampled_tokens", "accepted_tokens", "drafted_tokens", "draft_steps", TIMED_STEPS, PROMPT_SECONDS)


@st.composite
def statuses(draw: st.DrawFn) -> list[NodeStatus]:
    """Three of one node, in the order of their times."""
    costs, counted, made = draw(COSTS), dict.fromkeys(COUNTERS, 100.0), []
    for _ in range(3):
        num_decoding, waiting = draw(st.sampled_from((0, 1, 40))), draw(st.sampled_from((0, 1, LONG)))
        answers, right = draw(st.sampled_from((0, 1, 500))), draw(st.integers(0, 3))
        more = {"sampled_tokens": answers * (1 + right), "accepted_tokens": answers * right}
        more |= {"drafted_tokens": answers * 3, "draft_steps": answers, TIMED_STEPS: answers, PROMPT_SECONDS: 0.1}
        counted = {name: counted[name] + more[name] for name in COUNTERS}
        links = tuple(LinkStatus(name, ("tcp",), 1e-4, 1e9) for name in ROLES)
        lengths = (0,) * (waiting.bit_length() - 1) + (waiting,) if waiting else ()
        made.append(
            replace(
                node_status(),
                counters=counted,
                costs=costs,
                links=links,
                num_decoding=num_decoding,
                context_tokens=num_decoding * LONG,
                waiting_tokens=waiting,
                waiting_depths=waiting * LONG,
                waiting_lengths=lengths,
            )
        )
    return made


@settings(max_examples=300, deadline=None)
@given(
    reports=st.tuples(*(statuses() for _ in ROLES)),
    objectives=st.sampled_from((Objectives(), Objectives(1.0, 0.01), Objectives(None, 1e-4), Objectives(0.1, None))),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_heartbeats_are_taken_and_requests_get_plans(
    reports: tuple[list[NodeStatus], ...], objectives: Objectives, policy: str
) -> None:
    ledger = Ledger()
    snapshots = Snapshots(ClusterIndex(), ledger, roles_are_fixed=False)
    for turn in range(3):
        for (name, role), of_node in zip(ROLES.items(), reports, strict=True):
            snapshots.heartbeat(node_info(name, role), of_node[turn], 0.5 * turn)
        for each in range(2):
            now_s, number = 0.5 * turn + 0.1 * each, 2 * turn + each
            request = RoutedRequest(number, (64, LONG)[each], 200, objectives=objectives)
            candidates = snapshots.take(ROLES, KEYS, request.num_tokens, now_s)
            plan = POLICIES[policy].choose(request, candidates)
            assert plan is not None
            predicted = (plan.prediction.first_token_s, plan.prediction.token_gap_s, plan.relief_s)
            assert not any(math.isnan(seconds) for seconds in predicted if seconds is not None)
            ledger.sent(request, plan, candidates, KEYS)
            ledger.reserved(number)
            ledger.started(number, now_s)
            if each:
                ledger.prompt_computed(number, now_s)
