"""One request's life, by literals: events in, instructions out."""

import pytest

from headrace.request import FinishReason, PromptLogprobs, Token
from headrace.token_array import TokenArray
from headrace.wire import messages as m
from headrace.wire.errors import (
    NodeBusy,
    NodeLost,
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
from router.requests.states import RequestPhase
from tests.support.router.fake_nodes import reservation
from tests.support.router.request_lives import (
    DECODED,
    LANDED,
    PREFILLED,
    A,
    B,
    C,
    after,
    decoding,
    life,
    moving,
    prefilling,
)


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
        "decode": {
            "node": "d0",
            "attention_hit_tokens": 32,
            "state": "received",
            "fetched_tokens": 0,
            "drafted_tokens": 9,
            "accepted_tokens": 6,
        },
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
    assert request.shown.request_so_far.sampling.prompt_logprobs == 1
    assert request.on(scores(1, 10), 2.0) == []
    assert request.on(scores(10, 30), 2.0) == [ShowPrompt(scores(16, 30))]
    assert request.on(scores(30, 40), 2.0) == [ShowPrompt(scores(30, 40))]
    assert request.shown.request_so_far.sampling.prompt_logprobs is None


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
    assert request.shown.request_so_far.tokens[-1] == 7
    after(request, DecodeStarted("d1"), reservation(2), PrefillStarted("p1", 2))
    assert request.on(m.FirstToken(B), 3.0) == [Show((B,))]


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
    assert request.shown.request_so_far.tokens == TokenArray.of((*range(40), 7, 8))
    assert request.shown.request_so_far.num_prompt_tokens == 40
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
