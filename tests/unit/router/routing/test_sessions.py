"""Sessions: the nodes of each one's last request, and the ties that they decide."""

from dataclasses import replace

import pytest

from router.routing import sessions as module
from router.routing.candidates import Load
from router.routing.plan import Policy, RoutedRequest
from router.routing.policies.by_name import POLICIES
from router.routing.sessions import Sessions
from tests.support.router.candidates import candidate, linked

REQUEST = RoutedRequest(number=0, num_tokens=1000, answer_tokens=100)
BY_COST = sorted(name for name in POLICIES if name != "round_robin")


def test_the_newest_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "KEPT_SESSIONS", 2)
    sessions = Sessions()
    sessions.served("a", "d0", "p0")
    sessions.served("b", None, "p1")
    sessions.served("a", "d1", "d1")
    sessions.served("c", "d2")
    sessions.served("", "d3")
    assert [sessions.nodes_of(name) for name in ("a", "b", "c", "")] == [("d1",), (), ("d2",), ()]


def nodes_of(policy: Policy, request: RoutedRequest, *, load: Load | None = None) -> set[str | None]:
    nodes = linked(*(candidate(f"n{index}", load=load if index == 2 else None) for index in range(4)))
    plan = policy.choose(request, nodes)
    assert plan is not None
    return {plan.prefill, plan.decode}


@pytest.mark.parametrize("name", BY_COST)
def test_equal_nodes_take_turns_but_for_a_session(name: str):
    policy, turns = POLICIES[name], [replace(REQUEST, number=number) for number in range(8)]
    assert len(set().union(*(nodes_of(policy, turn) for turn in turns))) == 4
    for turn in turns:
        assert nodes_of(policy, replace(turn, session_nodes=("n2",))) == {"n2"}


@pytest.mark.parametrize("name", BY_COST)
def test_a_session_does_not_go_to_a_busier_node(name: str):
    busy = Load(num_decoding=8, context_tokens=80_000, waiting_tokens=20_000, free_tokens=20_000, free_slots=20)
    for number in range(8):
        request = replace(REQUEST, number=number, session_nodes=("n2",))
        assert "n2" not in nodes_of(POLICIES[name], request, load=busy)


def test_the_nodes_of_a_session_that_have_left_are_nothing():
    for name in BY_COST:
        assert nodes_of(POLICIES[name], replace(REQUEST, session_nodes=("gone",)))
