"""Requests that may be what ends nodes: whom they are given to, and when they end."""

import pytest

from headrace.request import Token
from headrace.wire import messages as m
from headrace.wire.errors import (
    NodeCrashed,
    NodeError,
    NodeLost,
    NodeStalled,
    NodeStopped,
)
from router.errors import IllegalEvent
from router.requests.events import (
    DecodeLost,
    DecodeStarted,
    FailRequest,
    Judged,
    PrefillFailed,
    PrefillStarted,
    SendRenew,
    StartOver,
)
from router.requests.lifecycle import RequestLifecycle
from router.requests.states import RequestPhase
from tests.support.router.fake_nodes import reservation
from tests.support.router.request_lives import (
    A,
    B,
    after,
    decoding,
    life,
)

CRASHED = NodeCrashed("n", "the engine crashed: RuntimeError('poison')")
LOST = NodeLost("n", "gone")
STALLED = NodeStalled("n", "its engine stands still")
COMPUTING = m.ComputeStarted()
LOCALLY = (DecodeStarted("d0"), m.LocalPrefill(0))


def remotely(nonce: int) -> tuple[object, ...]:
    return DecodeStarted("d0"), reservation(nonce), PrefillStarted("p0", nonce), COMPUTING


def assert_quarantined(request: RequestLifecycle) -> None:
    assert request.failure is not None
    assert (request.failure.status, request.failure.code) == (500, "node_crashed")
    assert request.failure.headers == {"x-should-retry": "false"}


@pytest.mark.parametrize("first", [CRASHED, LOST, STALLED])
@pytest.mark.parametrize("second", [CRASHED, LOST, STALLED])
def test_a_request_under_which_two_prefill_nodes_are_lost_gets_no_third(first: NodeError, second: NodeError):
    request = after(life(), *remotely(1))
    assert request.on(PrefillFailed(1, first), 1.0) == [SendRenew(1)]
    after(request, reservation(2), PrefillStarted("p1", 2), COMPUTING)
    instructions = request.on(PrefillFailed(2, second), 2.0)
    if LOST in (first, second):  # a connection may have been all that was lost
        assert instructions == [StartOver()] and request.failures.await_judgement
        instructions = request.on(Judged(frozenset()), 3.0)
    assert isinstance(instructions[0], FailRequest)
    assert_quarantined(request)


@pytest.mark.parametrize("second", [LOST, CRASHED])
def test_a_node_that_outlived_its_loss_casts_no_suspicion(second: NodeError):
    request = after(life(), *LOCALLY, DecodeLost(NodeLost("d0", "gone")), *LOCALLY, DecodeLost(second))
    assert request.on(Judged(frozenset({"d0"})), 3.0) == []
    assert not request.failures.await_judgement and request.failures.suspicious_losses == 1
    assert after(request, *LOCALLY, m.Tokens((A,))).phase is RequestPhase.DECODING


def test_what_a_request_has_cost_for_certain_is_not_judged_again():
    lost = [*LOCALLY, DecodeLost(LOST), *LOCALLY, DecodeLost(NodeLost("d1", "gone"))]
    request = after(life(), *lost, Judged(frozenset({"d1"})))
    assert isinstance(after(request, *LOCALLY).on(DecodeLost(CRASHED), 3.0)[0], FailRequest)
    assert_quarantined(request)


def test_losses_that_were_none_are_failed_attempts_all_the_same():
    request = after(life(), *[*LOCALLY, DecodeLost(LOST)] * 2, Judged(frozenset({"n"})), *LOCALLY)
    after(request, DecodeLost(LOST))
    assert request.failure is not None and request.failure.code == "no_node_available"


def test_nothing_is_judged_without_a_loss():
    with pytest.raises(IllegalEvent):
        life().on(Judged(frozenset()), 1.0)


def test_losses_at_both_roles_count_together():
    request = after(life(), *remotely(1), PrefillFailed(1, CRASHED))
    after(request, reservation(2), PrefillFailed(2, None), *LOCALLY, DecodeLost(CRASHED))
    assert_quarantined(request)


def test_nodes_lost_with_a_request_that_only_waits_there_cast_no_suspicion():
    request = after(life(), DecodeStarted("d0"), reservation(1), PrefillStarted("p0", 1), PrefillFailed(1, LOST))
    after(request, reservation(2), PrefillStarted("p1", 2), PrefillFailed(2, LOST))
    assert request.failures.suspicious_losses == 0 and not request.is_over


def test_nodes_that_were_stopped_or_died_of_other_requests_cast_no_suspicion():
    stopped = NodeStopped("n", "the engine ended: it has crashed")
    request = after(life(), *remotely(1), PrefillFailed(1, stopped), reservation(2), PrefillStarted("p1", 2), COMPUTING)
    after(request, PrefillFailed(2, None), *LOCALLY, DecodeLost(stopped))
    assert request.failures.suspicious_losses == 0 and not request.is_over


def test_a_decode_node_lost_at_its_first_token_is_suspicious_and_later_is_not():
    request = after(decoding(), DecodeLost(LOST))
    assert request.failures.suspicious_losses == 1
    request = after(decoding(), m.Tokens((B,)), DecodeLost(LOST))
    assert request.failures.suspicious_losses == 0


def test_a_request_that_goes_on_after_a_crash_was_not_its_cause():
    """Sixty-four requests share the step that one of them ends."""
    request = after(life(), *LOCALLY, DecodeLost(CRASHED), *LOCALLY, m.Tokens((A,)), DecodeLost(CRASHED))
    assert not request.is_over
    after(request, *LOCALLY, m.Tokens((B,)))
    assert request.generated == [7, 8]
    after(request, DecodeLost(CRASHED))
    assert_quarantined(request)  # it made progress each time, but the third node is enough


def test_a_request_may_migrate_as_often_as_nodes_are_lost_under_it():
    request = life(max_tokens=99)
    for token in range(20):
        after(request, *LOCALLY, m.Tokens((Token(token),)))
        assert request.on(DecodeLost(LOST), 1.0) == [StartOver()]
    assert request.report.migrations == 20


def test_a_token_begins_the_count_of_failures_anew():
    request = after(life(), *[DecodeLost(LOST)] * 2, *LOCALLY, m.Tokens((A,)), *[DecodeLost(LOST)] * 2)
    assert not request.is_over
    (failed,) = request.on(DecodeLost(LOST), 1.0)
    assert isinstance(failed, FailRequest) and failed.cause.code == "no_node_available"
