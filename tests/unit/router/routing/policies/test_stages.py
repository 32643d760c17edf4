"""Behaviour that all baselines share: they keep to roles, and a node that does both keeps the request."""

from dataclasses import replace

import pytest

from headrace.cache.hits import PrefixHit
from headrace.wire.node_messages import Role
from router.routing.candidates import LinkCosts
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
    islands = [node._replace(links={}) for node in DIVIDED]
    chosen = {nodes(policy.choose(replace(REQUEST, number=number), islands)) for number in range(4)}
    assert {("p0", "p0"), ("p1", "p1")} <= chosen


def test_nobody_does_what_is_not_allowed(policy: Policy) -> None:
    may = {"p0": (True, False), "p1": (True, False), "d0": (False, False), "d1": (False, True)}
    fixed = [node._replace(may_prefill=may[node.name][0], may_decode=may[node.name][1]) for node in DIVIDED]
    chosen = {nodes(policy.choose(replace(REQUEST, number=number), fixed)) for number in range(4)}
    assert chosen == {("p0", "d1"), ("p1", "d1")}
    assert policy.choose(REQUEST, [node for node in fixed if node.role is Role.DECODE]) is None
    assert policy.choose(REQUEST, [node._replace(links={}) for node in fixed]) is None


def test_a_decode_node_that_no_prefill_node_reaches_serves_alone_in_its_turn() -> None:
    d0, d1, p0 = linked(candidate("p0", Role.PREFILL), *(candidate(f"d{i}", Role.DECODE) for i in range(2)))
    apart = sorted([p0._replace(links={"d1": LinkCosts()}), d0, d1], key=lambda node: node.name)
    chosen = {nodes(RoundRobin().choose(replace(REQUEST, number=number), apart)) for number in range(4)}
    assert chosen == {("p0", "d1"), ("d0", "d0")}


def test_the_prefill_node_fetches_from_the_one_with_the_deepest_checkpoint(policy: Policy) -> None:
    def fetched(own: PrefixHit, **facts: bool) -> str | None:
        hits = {"p0": own, "d0": PrefixHit(96, 32, 32), "d1": PrefixHit(64, 64, 64)}
        nodes = [node._replace(hit=hits[node.name]) for node in DIVIDED if node.name in hits]
        plan = policy.choose(replace(REQUEST, **facts), nodes)
        assert plan is not None
        return plan.fetch_from

    assert fetched(PrefixHit(32, 32, 32)) == "d1"
    assert fetched(PrefixHit(64, 64, 64)) is None
    assert fetched(PrefixHit(32, 32, 32), may_fetch=False) is None
    assert fetched(PrefixHit(32, 32, 32), is_scored=True) is None


def test_a_scored_prompt_is_expected_to_be_computed_whole(policy: Policy) -> None:
    cached = linked(*(candidate(f"n{i}", hit=960) for i in range(2)))
    plain, scored = (policy.choose(replace(REQUEST, is_scored=scored), cached) for scored in (False, True))
    assert plain is not None
    assert scored is not None
    assert (plain.prediction.computed_tokens, scored.prediction.computed_tokens) == (40, 1000)
