"""One request's life, by literals: events in, instructions out."""

import pytest

from headrace.request import FinishReason, PromptLogprobs, Request, Sampling, Token
from headrace.wire import messages as m
from headrace.wire.errors import (
    NodeBusy,
    NodeCrashed,
    NodeError,
    NodeLost,
    NodeStalled,
    NodeStopped,
    RequestRefused,
    TransferBroken,
)
from router.errors import ApiError, IllegalEvent, deadline_passed
from router.requests.events import (
    DecodeLost,
    DecodeStarted,
    FailRequest,
    FinishRequest,
    GaveUp,
    Judged,
    PrefillFailed,
    PrefillStarted,
    SendRenew,
    SendStop,
    Show,
    ShowPrompt,
    StartOver,
    StartPrefill,
    StopFound,
)
from router.requests.lifecycle import RequestLifecycle
from router.requests.states import RequestPhase
from tests.support.router.fake_nodes import reservation

A, B, C = Token(7), Token(8), Token(9)
LANDED = m.TransferReport(8, 100, 200, 0.5)
DECODED = m.DecodeDone(FinishReason.LENGTH, m.DecodeReport("d0", 32, 0, "received", 0, (48,)))
PREFILLED = m.PrefillDone(m.PrefillReport("p0", 32, 16, 16, 24, (32,)))


def life(**sampling: int) -> RequestLifecycle:
    settings = Sampling(**({"max_tokens": 8, "seed": 1} | sampling))
    return RequestLifecycle(Request("r", tuple(range(40)), 40, settings), max_attempts=3, now_s=0.0)


def after(request: RequestLifecycle, *events: object) -> RequestLifecycle:
    for event in events:
        request.on(event, 1.0)  # type: ignore[arg-type]
    return request


def prefilling(**sampling: int) -> RequestLifecycle:
    return after(life(**sampling), DecodeStarted("d0"), reservation(1), PrefillStarted("p0", 1))


def moving() -> RequestLifecycle:
    return after(prefilling(), m.FirstToken(A))


def decoding() -> RequestLifecycle:
    return after(moving(), LANDED)


def test_remote_life_from_queue_to_done():
    request = life()
    assert request.on(DecodeStarted("d0"), 1.0) == []
    assert request.on(reservation(1), 2.0) == [StartPrefill(reservation(1), None)]
    assert request.phase is RequestPhase.RESERVED
    assert request.on(PrefillStarted("p0", 1), 3.0) == []
    assert request.phase is RequestPhase.PREFILLING
    assert request.on(m.FirstToken(A), 4.0) == [Show((A,))]
    assert request.phase is RequestPhase.MOVING
    assert request.on(LANDED, 5.0) == []
    assert request.phase is RequestPhase.DECODING
    assert request.on(PREFILLED, 5.5) == []
    assert request.on(m.Tokens((B, C)), 6.0) == [Show((B, C))]
    assert request.on(DECODED, 7.0) == [FinishRequest(FinishReason.LENGTH)]
    assert request.phase is RequestPhase.DONE
    assert request.generated == [7, 8, 9]
    assert request.entered_s == {
        RequestPhase.QUEUED: 0.0,
        RequestPhase.RESERVED: 2.0,
        RequestPhase.PREFILLING: 3.0,
        RequestPhase.MOVING: 4.0,
        RequestPhase.DECODING: 5.0,
        RequestPhase.DONE: 7.0,
    }


def test_report_is_the_one_of_the_design():
    request = after(moving(), LANDED, PREFILLED, DECODED)
    assert request.report.json() == {
        "path": "remote",
        "prefill": {
            "node": "p0",
            "attention_hit_tokens": 32,
            "state_hit_tokens": 16,
            "fetched_tokens": 0,
            "computed_tokens": 24,
        },
        "decode": {"node": "d0", "attention_hit_tokens": 32, "state": "received", "fetched_tokens": 0},
        "transfer": {"attention_tokens": 8, "attention_bytes": 100, "state_bytes": 200, "seconds": 0.5},
        "checkpoints": [32, 48],
        "migrations": 0,
        "routing": None,
        "moves": 0,
    }
    assert request.report.cached_tokens(40) == 16


def test_local_life_counts_what_the_decode_node_resumed():
    request = after(life(), DecodeStarted("d0"), m.LocalPrefill(24))
    assert request.phase is RequestPhase.PREFILLING
    assert request.on(m.Tokens((A,)), 1.0) == [Show((A,))]
    assert request.phase is RequestPhase.DECODING
    done = m.DecodeDone(FinishReason.STOP, m.DecodeReport("d0", 32, 24, "resumed", 16))
    assert request.on(done, 2.0) == [FinishRequest(FinishReason.STOP)]
    assert request.report.cached_tokens(40) == 24
    report = request.report.json()
    assert (report["path"], report["prefill"], report["transfer"]) == ("local", None, None)


def test_first_token_that_finishes_ends_the_answer_without_the_decode_node():
    request = prefilling()
    assert request.on(m.FirstToken(A, FinishReason.STOP), 1.0) == [Show((A,)), FinishRequest(FinishReason.STOP)]
    assert request.on(PREFILLED, 2.0) == []  # its report may still come
    assert request.report.cached_tokens(40) == 16


def test_one_token_needs_a_prefill_node_only():
    request = life(max_tokens=1)
    assert not request.needs_decode
    after(request, PrefillStarted("p0", None))
    assert request.on(m.FirstToken(A, FinishReason.LENGTH), 1.0) == [Show((A,))]
    assert request.on(PREFILLED, 2.0) == [FinishRequest(FinishReason.LENGTH)]


def test_prompt_logprobs_alone():
    request = after(life(max_tokens=0), PrefillStarted("p0", None))
    for part in (PromptLogprobs(1, (-1.0,) * 20), PromptLogprobs(21, (-2.0,) * 19)):
        assert request.on(part, 1.0) == [ShowPrompt(part)]
    assert request.on(PREFILLED, 2.0) == [FinishRequest(FinishReason.LENGTH)]
    assert request.generated == []


def test_prompt_logprobs_are_shown_once_and_not_asked_for_again():
    request = prefilling(prompt_logprobs=1)
    assert len(request.on(scores(1, 16), 1.0)) == 1
    after(request, DecodeLost(NodeLost("d0", "gone")), DecodeStarted("d1"), reservation(2), PrefillStarted("p0", 2))
    assert request.request_so_far.sampling.prompt_logprobs == 1
    assert request.on(scores(1, 10), 2.0) == []
    assert request.on(scores(10, 30), 2.0) == [ShowPrompt(scores(16, 30))]
    assert request.on(scores(30, 40), 2.0) == [ShowPrompt(scores(30, 40))]
    assert request.request_so_far.sampling.prompt_logprobs is None


def test_prompt_logprobs_with_a_gap_are_no_event_of_the_protocol():
    request = prefilling(prompt_logprobs=1)
    with pytest.raises(IllegalEvent, match="PromptLogprobs"):
        request.on(scores(2, 40), 1.0)


def scores(start: int, end: int) -> PromptLogprobs:
    positions = tuple(range(start, end))
    logprobs = tuple(-float(position) for position in positions)
    return PromptLogprobs(start, logprobs, positions, logprobs)


@pytest.mark.parametrize("cause", [NodeLost("p0", "gone"), TransferBroken("p0", "digest")])
def test_a_failed_prefill_renews_the_reservation_and_repeats_the_shown_token(cause):
    request = moving()
    assert request.on(PrefillFailed(1, cause), 1.0) == [SendRenew(1)]
    assert request.on(reservation(2), 2.0) == [StartPrefill(reservation(2), first_token=7)]
    assert request.phase is RequestPhase.RESERVED
    after(request, PrefillStarted("p1", 2))
    assert request.on(m.FirstToken(A), 3.0) == []  # the client has it
    assert request.on(LANDED, 4.0) == []
    assert request.on(m.Tokens((B,)), 5.0) == [Show((B,))]
    assert request.generated == [7, 8]
    assert request.report.migrations == 0


def test_one_failure_reported_by_both_nodes_is_repaired_once():
    request = moving()
    assert request.on(m.SessionFailed(1, "digest"), 1.0) == [SendRenew(1)]
    assert request.on(PrefillFailed(1, TransferBroken("p0", "digest")), 1.0) == []
    after(request, reservation(2), PrefillStarted("p0", 2))
    assert request.on(m.SessionFailed(1, "digest"), 2.0) == []


def test_repairs_are_bounded():
    request = prefilling()
    for nonce in (1, 2):
        assert request.on(PrefillFailed(nonce, NodeLost("p0", "gone")), 1.0) == [SendRenew(nonce)]
        after(request, reservation(nonce + 1), PrefillStarted("p0", nonce + 1))
    (failed,) = request.on(PrefillFailed(3, NodeLost("p0", "gone")), 1.0)
    assert isinstance(failed, FailRequest)
    assert failed.cause.status == 503
    assert request.phase is RequestPhase.FAILED


def test_a_prefill_node_without_room_has_the_reservation_given_back_and_uses_no_attempt_up():
    """What is reserved may be the very room that others wait for, and this one for theirs."""
    request = prefilling()
    for nonce in range(1, 10):
        assert request.on(PrefillFailed(nonce, NodeBusy("p0", "full")), 1.0) == [StartOver()]
        after(request, DecodeStarted("d0"), reservation(nonce + 1), PrefillStarted("p0", nonce + 1))
    assert request.report.migrations == 0


def test_without_room_on_a_prefill_node_the_shown_token_is_not_computed_again():
    request = moving()
    assert request.on(PrefillFailed(1, NodeBusy("p0", "full")), 1.0) == [StartOver()]
    assert request.request_so_far.tokens[-1] == 7
    after(request, DecodeStarted("d1"), reservation(2), PrefillStarted("p1", 2))
    assert request.on(m.FirstToken(B), 3.0) == [Show((B,))]


# ------------------------------------------------------------ requests that may be what ends nodes

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


def test_without_prefill_nodes_the_request_starts_over():
    request = after(life(), DecodeStarted("d0"), reservation(1))
    assert request.on(PrefillFailed(1, None), 1.0) == [StartOver()]
    assert after(request, m.LocalPrefill(0)).phase is RequestPhase.PREFILLING


def test_a_prefill_that_fails_after_landing_needs_no_repair():
    assert decoding().on(PrefillFailed(1, NodeLost("p0", "gone")), 1.0) == []


def test_landed_but_the_first_token_is_lost_starts_over():
    request = after(prefilling(), LANDED)
    assert request.on(PrefillFailed(1, NodeLost("p0", "gone")), 1.0) == [StartOver()]


def test_landing_after_a_renewal_without_the_first_token_starts_over():
    request = prefilling()
    assert request.on(PrefillFailed(1, NodeLost("p0", "gone")), 1.0) == [SendRenew(1)]
    assert request.on(LANDED, 2.0) == [StartOver()]


def test_tokens_that_overtake_the_first_one_are_held_back():
    request = prefilling()
    assert request.on(LANDED, 1.0) == []
    assert request.on(m.Tokens((B,)), 2.0) == []
    assert request.on(m.FirstToken(A), 3.0) == [Show((A,)), Show((B,))]
    assert request.phase is RequestPhase.DECODING
    assert request.on(m.Tokens((C,)), 4.0) == [Show((C,))]


def test_an_end_that_overtakes_the_first_token_waits_for_it():
    request = after(prefilling(), LANDED, m.Tokens((B,)))
    assert request.on(DECODED, 3.0) == []
    shown = request.on(m.FirstToken(A), 4.0)
    assert shown == [Show((A,)), Show((B,)), FinishRequest(FinishReason.LENGTH)]


def test_a_lost_decode_node_migrates_prompt_and_tokens():
    request = after(decoding(), m.Tokens((B,)))
    assert request.on(DecodeLost(NodeLost("d0", "gone")), 1.0) == [StartOver()]
    assert request.phase is RequestPhase.MIGRATING
    assert request.request_so_far.tokens == (*range(40), 7, 8)
    assert request.request_so_far.num_prompt_tokens == 40
    after(request, DecodeStarted("d1"), reservation(5), PrefillStarted("p0", 5))
    assert request.on(m.FirstToken(C), 2.0) == [Show((C,))]
    after(request, LANDED, DECODED)
    assert request.report.migrations == 1
    assert request.generated == [7, 8, 9]


def test_a_decode_node_lost_before_it_answered_is_no_migration():
    request = after(life(), DecodeStarted("d0"))
    assert request.on(DecodeLost(NodeLost("d0", "gone")), 1.0) == [StartOver()]
    assert request.phase is RequestPhase.QUEUED
    assert request.report.migrations == 0


def test_a_refusal_fails_at_once_with_400():
    (failed,) = life().on(DecodeLost(RequestRefused("d0", "too long")), 1.0)
    assert isinstance(failed, FailRequest)
    assert failed.cause.status == 400


def test_stop_while_decoding_waits_for_the_report_and_drops_later_tokens():
    request = decoding()
    assert request.on(StopFound(), 1.0) == [SendStop()]
    assert request.on(m.Tokens((B,)), 2.0) == []
    assert request.on(DECODED, 3.0) == [FinishRequest(FinishReason.STOP)]
    assert request.generated == [7]


def test_stop_before_decoding_finishes_at_once():
    assert moving().on(StopFound(), 1.0) == [FinishRequest(FinishReason.STOP)]


def test_a_decode_node_lost_after_stop_changes_nothing():
    request = after(decoding(), StopFound())
    assert request.on(DecodeLost(NodeLost("d0", "gone")), 1.0) == [FinishRequest(FinishReason.STOP)]


def test_a_decode_node_lost_after_its_last_token_costs_only_the_report():
    request = decoding()
    request.on(m.Tokens((Token(9),), FinishReason.LENGTH), 1.0)
    assert request.on(DecodeLost(NodeLost("d0", "gone")), 1.0) == [FinishRequest(FinishReason.LENGTH)]


def test_giving_up_fails_with_its_cause():
    request = decoding()
    cause = deadline_passed(5)
    assert request.on(GaveUp(cause), 1.0) == [FailRequest(cause)]
    assert isinstance(request.failure, ApiError)


@pytest.mark.parametrize(
    ("request_", "event"),
    [
        (life(), m.FirstToken(A)),
        (life(), LANDED),
        (life(), DECODED),
        (life(), m.Tokens((A,))),
        (decoding(), reservation(9)),
        (after(decoding(), DECODED), m.Tokens((A,))),
    ],
)
def test_illegal_transitions_raise(request_, event):
    with pytest.raises(IllegalEvent):
        request_.on(event, 1.0)
