"""Behaviour that all baselines share: they keep to roles, and a node that does both keeps the request."""

from dataclasses import replace

import pytest

from headrace.wire.messages import Role
from router.routing.plan import Plan, Policy, RoutedRequest
from router.routing.policies.dynamo import Dynamo
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.llm_d import LlmD
from router.routing.policies.round_robin import RoundRobin
from tests.support.router.candidates import candidate, linked

REQUEST = RoutedRequest(number=0, num_tokens=1000, answer_tokens=100)
UNDIVIDED = linked(*(candidate(f"n{i}") for i in range(3)))
DIVIDED = linked(
    *(candidate(f"p{i}", Role.PREFILL) for i in range(2)), *(candidate(f"d{i}", Role.DECODE) for i in range(2))
)


def nodes(plan: Plan | None) -> tuple[str, str | None]:
    assert plan is not None
    assert plan.fetch_from is None
    return plan.prefill, plan.decode


@pytest.fixture(params=[RoundRobin(), LeastLoaded(), Dynamo(), LlmD()], ids=lambda policy: type(policy).__name__)
def policy(request: pytest.FixtureRequest) -> Policy:
    return request.param


def test_without_nodes_there_is_no_plan(policy: Policy) -> None:
    assert policy.choose(REQUEST, []) is None


def test_equal_undivided_nodes_take_turns_and_keep_the_request(policy: Policy) -> None:
    chosen = [nodes(policy.choose(replace(REQUEST, number=number), UNDIVIDED)) for number in range(4)]
    assert chosen == [("n0", "n0"), ("n1", "n1"), ("n2", "n2"), ("n0", "n0")]


def test_each_role_of_a_divided_cluster_takes_turns(policy: Policy) -> None:
    chosen = [nodes(policy.choose(replace(REQUEST, number=number), DIVIDED)) for number in range(3)]
    assert chosen == [("p0", "d0"), ("p1", "d1"), ("p0", "d0")]


def test_one_token_needs_no_decode_node(policy: Policy) -> None:
    assert nodes(policy.choose(replace(REQUEST, needs_decode=False), DIVIDED)) == ("p0", None)


def test_decode_nodes_alone_prefill_as_well(policy: Policy) -> None:
    assert nodes(policy.choose(REQUEST, [node for node in DIVIDED if node.role is Role.DECODE])) == ("d0", "d0")


def test_a_prefill_node_that_reaches_no_other_decodes_itself(policy: Policy) -> None:
    islands = [replace(node, links={}) for node in DIVIDED]
    assert nodes(policy.choose(REQUEST, islands)) == ("p0", "p0")


def test_a_scored_prompt_is_expected_to_be_computed_whole(policy: Policy) -> None:
    cached = linked(*(candidate(f"n{i}", hit=960) for i in range(2)))
    plain, scored = (policy.choose(replace(REQUEST, is_scored=scored), cached) for scored in (False, True))
    assert plain is not None
    assert scored is not None
    assert (plain.prediction.computed_tokens, scored.prediction.computed_tokens) == (40, 1000)
