"""Decisions are kept for a while, with what explains them."""

from headrace.cache.hits import PrefixHit
from headrace.wire.node_messages import Role
from router.routing.candidates import Load
from router.routing.decisions import KEPT_CANDIDATES, Decision, DecisionLog
from router.routing.plan import Plan, Prediction, RoutedRequest
from tests.support.router.candidates import candidate

REQUEST = RoutedRequest(0, 100, 10)


def decision(plan: Plan, *names: str) -> Decision:
    return Decision(REQUEST, "request", plan, [candidate(name) for name in names])


def test_the_oldest_request_is_dropped_first() -> None:
    log = DecisionLog(kept_requests=2)
    first, again, second, third = (decision(Plan("p0", "d0"), "p0", "d0") for _ in range(4))
    log.add("a-0", first)
    log.add("b-0", second)
    log.add("a-0", again)
    log.add("c-0", third)
    assert (log.of("a-0"), log.of("b-0"), log.of("c-0")) == ({"a-0": [first, again]}, {}, {"c-0": [third]})


def test_the_id_of_an_answer_names_all_its_choices() -> None:
    log = DecisionLog()
    for name in ("cmpl-1-0", "cmpl-1-1", "cmpl-1-x", "cmpl-11-0"):
        log.add(name, decision(Plan("p0", "d0"), "p0", "d0"))
    assert list(log.of("cmpl-1")) == ["cmpl-1-0", "cmpl-1-1"]
    assert log.of("cmpl") == {}


def test_the_id_of_an_http_request_names_its_answer() -> None:
    log = DecisionLog()
    for name in ("chatcmpl-a-1-0", "resp_a-1-0", "chatcmpl-b-a-1-0", "chatcmpl-a-11-0"):
        log.add(name, decision(Plan("p0", "d0"), "p0", "d0"))
    assert list(log.of("a-1")) == ["chatcmpl-a-1-0", "resp_a-1-0"]
    assert log.of("1") == {}


def test_of_many_candidates_the_chosen_ones_and_those_of_note_are_kept() -> None:
    nodes = [candidate(f"n{i:02}", Role.BOTH, load=Load(waiting_tokens=1000 + i)) for i in range(50)]
    nodes[40] = nodes[40]._replace(hit=PrefixHit(64, 32, 32))
    json = Decision(REQUEST, "request", Plan("n30", "n31", "n32"), nodes).json()
    kept = [each["name"] for each in json["candidates"]]
    assert {"n30", "n31", "n32", "n40", "n00"} <= set(kept)
    assert len(kept) <= KEPT_CANDIDATES
    assert json["num_candidates"] == 50
    chosen = {each["name"]: each["chosen_for"] for each in json["candidates"] if each["chosen_for"]}
    assert chosen == {"n30": ["prefill"], "n31": ["decode"], "n32": ["fetch_from"]}


def test_kinds_of_plans() -> None:
    plans = (Plan("p", "d"), Plan("p", "d", "e"), Plan("d", "d"), Plan("p", None))
    kinds = [decision(plan, "p", "d", "e").plan_kind for plan in plans]
    assert kinds == ["hand_over", "fetch_and_hand_over", "alone", "first_token"]


def test_outcomes_are_compared_with_what_was_predicted() -> None:
    made = decision(Plan("p", "d", prediction=Prediction(0.5, None, 100)), "p", "d")
    made.outcome.first_token_s, made.outcome.token_gap_s, made.outcome.computed_tokens = 1.0, 0.01, 50
    assert dict(made.compared()) == {"first_token": 2.0, "computed_tokens": 0.5}
