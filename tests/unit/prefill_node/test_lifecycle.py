"""Every way that one request can take through a prefill node, by literals: events in, instructions out."""

import pytest

from headrace.cache.hits import PrefixHit
from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.engine.sequence import AdmissionTimedOut, Admitted, Computed, Finished, Sampled, Scored, Started
from headrace.request import FinishReason, PromptLogprobs, Token
from headrace.step_costs import StepCosts
from headrace.wire.messages import ComputeStarted, FirstToken, PrefillReport
from node_runtime.config import FetchConfig
from node_runtime.fetch_policy import FetchCosts, FetchPolicy
from node_runtime.lifecycle import Admitting, CallBroken, CallEnded, Done, Fail, Refuse, Release, Released, Reply
from prefill_node.lifecycle import (
    CancelFetch,
    CancelTransfer,
    Computing,
    CountDeclinedFetch,
    FetchGivenUp,
    Fetching,
    FetchLanded,
    OpenTransfer,
    PrefillInput,
    PrefillLifecycle,
    PrefillLocally,
    PrefillState,
    Readmitting,
    Ready,
    ReplyPrefilled,
    ResumePrefill,
    SendComputed,
    Sending,
    SendState,
    StartFetch,
    TransferSent,
    prefill_report,
)
from transfer.protocol.errors import IllegalTransition, TransferFailed

NUM_TOKENS, SOURCE_TOKENS = 400, 320
LAYOUT = CacheLayout("f", "float32", "float32", 16, (AttentionGroup(2, 2, 8),), (StateGroup(3, (10, 3), (2, 4, 4)),))

ADMITTED = Admitted(PrefixHit(64, 48, 48), reused_tokens=48, state_arrives=False)
FROM_NOTHING = Admitted(PrefixHit(0, 0, 0), reused_tokens=0, state_arrives=False)
TO_FETCH = Admitted(PrefixHit(64, 48, 48), reused_tokens=64, state_arrives=True)
TOKEN, LAST = Sampled(Token(5), None), Sampled(Token(5), FinishReason.STOP)
FAILURE = TransferFailed("peer_lost", "eof")
OPENED = [OpenTransfer(), Reply(ComputeStarted())]


def new_lifecycle(
    state: PrefillState | None = None,
    *,
    is_sent: bool = True,
    first_token: int | None = None,
    fetch_source_tokens: int | None = None,
) -> PrefillLifecycle:
    policy = FetchPolicy(FetchConfig(), FetchCosts(), StepCosts(), 1024, LAYOUT, NUM_TOKENS, fetch_source_tokens)
    lifecycle = PrefillLifecycle(policy, is_sent=is_sent, first_token=first_token)
    if state is not None:
        lifecycle.state = state
    return lifecycle


def test_a_prompt_is_sent_as_it_is_computed_and_the_first_token_does_not_wait() -> None:
    request = new_lifecycle()
    assert request.on(ADMITTED) == [], "its first chunk waits for other prompts"
    assert request.on(Started()) == [*OPENED, SendComputed(Computed(48))], "what the cache held can go at once"
    assert request.on(Computed(256)) == [SendComputed(Computed(256))]
    assert request.on(Computed(400)) == [SendComputed(Computed(400))]
    assert request.on(TOKEN) == [SendState(5), Reply(FirstToken(Token(5)))]
    assert not request.is_over
    assert request.on(TransferSent()) == [ReplyPrefilled(ADMITTED, 48)]
    assert request.is_over
    assert request.on(CallEnded()) == [CancelTransfer(), Release()]
    assert request.state == Released()


def test_without_a_hit_there_is_nothing_to_send_at_first() -> None:
    request = new_lifecycle()
    assert request.on(FROM_NOTHING) == []
    assert request.on(Started()) == OPENED


def test_without_a_reservation_nothing_is_sent() -> None:
    request = new_lifecycle(is_sent=False)
    assert request.on(ADMITTED) == []
    assert request.on(Started()) == [Reply(ComputeStarted())]
    assert request.on(Computed(400)) == []
    assert request.on(TOKEN) == [Reply(FirstToken(Token(5))), ReplyPrefilled(ADMITTED, 48)]
    assert request.is_over
    assert request.on(CallEnded()) == [Release()]


def test_a_prompt_is_scored_before_its_first_token() -> None:
    request = new_lifecycle(Computing(FROM_NOTHING, 0))
    for part in (PromptLogprobs(1, (-1.0, -2.0)), PromptLogprobs(3, (-3.0,))):
        assert request.on(Scored(part)) == [Reply(part)]
    assert request.on(TOKEN) == [SendState(5), Reply(FirstToken(Token(5)))]


def test_a_first_token_that_ends_the_answer_sends_no_state() -> None:
    request = new_lifecycle(Computing(ADMITTED, 48))
    assert request.on(LAST) == [
        Reply(FirstToken(Token(5), FinishReason.STOP)),
        ReplyPrefilled(ADMITTED, 48),
    ]
    assert request.on(CallEnded()) == [CancelTransfer(), Release()]


def test_a_retry_continues_after_the_token_that_the_client_has_seen() -> None:
    request = new_lifecycle(Computing(ADMITTED, 48), first_token=3)
    assert request.on(TOKEN) == [SendState(3), Reply(FirstToken(Token(5)))]


def test_a_retry_is_sent_even_if_another_token_would_have_ended_the_answer() -> None:
    request = new_lifecycle(Computing(ADMITTED, 48), first_token=3)
    assert request.on(LAST) == [
        SendState(3),
        Reply(FirstToken(Token(5), FinishReason.STOP)),
    ]
    assert request.on(Finished(FinishReason.STOP)) == []
    assert request.on(TransferSent()) == [ReplyPrefilled(ADMITTED, 48)]


def test_a_request_that_wants_no_token_ends_with_its_prompt() -> None:
    request = new_lifecycle(Computing(ADMITTED, 48))
    assert request.on(Finished(FinishReason.LENGTH)) == [ReplyPrefilled(ADMITTED, 48)]


def test_a_request_that_finds_no_blocks_is_refused() -> None:
    request = new_lifecycle()
    late = AdmissionTimedOut("no blocks before the deadline")
    assert request.on(late) == [Refuse("no blocks before the deadline")]
    assert request.on(CallEnded()) == [CancelTransfer(), Release()]


def test_a_prompt_is_computed_from_where_a_fetch_landed() -> None:
    request = new_lifecycle(fetch_source_tokens=SOURCE_TOKENS)
    assert request.on(TO_FETCH) == [StartFetch(TO_FETCH)]
    assert request.on(FetchLanded(320)) == [ResumePrefill(320)]
    assert request.on(Started()) == [*OPENED, SendComputed(Computed(320))]
    assert request.on(Computed(400)) == [SendComputed(Computed(400))]
    assert request.on(TOKEN) == [SendState(5), Reply(FirstToken(Token(5)))]
    assert request.on(TransferSent()) == [ReplyPrefilled(TO_FETCH, 320)]


def test_what_cannot_be_fetched_is_computed_instead() -> None:
    request = new_lifecycle(fetch_source_tokens=SOURCE_TOKENS)
    assert request.on(TO_FETCH) == [StartFetch(TO_FETCH)]
    assert request.on(FetchGivenUp()) == [PrefillLocally()]
    assert request.state == Readmitting()
    assert request.on(ADMITTED) == [], "it was not declined: it failed"
    assert request.on(Started()) == [*OPENED, SendComputed(Computed(48))]
    assert request.on(TOKEN) == [SendState(5), Reply(FirstToken(Token(5)))]
    assert request.on(TransferSent()) == [ReplyPrefilled(ADMITTED, 48)]


def test_a_fetch_that_would_not_pay_is_counted_as_declined() -> None:
    request = new_lifecycle(fetch_source_tokens=SOURCE_TOKENS)
    assert request.on(ADMITTED) == [CountDeclinedFetch()]


def test_a_fetch_that_would_save_too_little_is_not_counted() -> None:
    request = new_lifecycle(fetch_source_tokens=96)  # 48 tokens more than are here, fewer than min_tokens
    assert request.on(ADMITTED) == []


STATES: dict[str, PrefillState] = {
    "admitting": Admitting(),
    "readmitting": Readmitting(),
    "fetching": Fetching(TO_FETCH),
    "ready": Ready(ADMITTED, Computed(48)),
    "computing": Computing(ADMITTED, 48),
    "sending": Sending(ADMITTED, 48),
    "done": Done(),
    "released": Released(),
}


@pytest.mark.parametrize("name", ["admitting", "readmitting", "fetching", "ready", "computing", "sending"])
def test_a_transfer_that_fails_ends_the_prefill_in_every_state(name: str) -> None:
    request = new_lifecycle(STATES[name])
    assert request.on(CallBroken(FAILURE)) == [Fail(FAILURE)]
    assert request.state == STATES[name], "its end gives back what that state holds"


def test_a_transfer_that_fails_after_the_end_changes_nothing() -> None:
    assert new_lifecycle(Done()).on(CallBroken(FAILURE)) == []


@pytest.mark.parametrize("name", [name for name in STATES if name != "released"])
def test_a_call_that_ends_gives_everything_back_in_every_state(name: str) -> None:
    fetch = [CancelFetch()] if name == "fetching" else []
    request = new_lifecycle(STATES[name])
    assert request.on(CallEnded()) == [*fetch, CancelTransfer(), Release()]
    assert request.state == Released()
    request = new_lifecycle(STATES[name], is_sent=False)
    assert request.on(CallEnded()) == [*fetch, Release()]


EVENTS: dict[str, PrefillInput] = {
    "admitted": ADMITTED,
    "admitted to fetch": TO_FETCH,
    "refused": AdmissionTimedOut("late"),
    "started": Started(),
    "computed": Computed(256),
    "scored": Scored(PromptLogprobs(1, ())),
    "sampled": TOKEN,
    "finished": Finished(FinishReason.STOP),
    "fetch landed": FetchLanded(320),
    "fetch given up": FetchGivenUp(),
    "sent": TransferSent(),
    "broken": CallBroken(FAILURE),
    "ended": CallEnded(),
}
AT_ANY_TIME = {"broken", "ended"}
LEGAL = {
    "admitting": {"admitted", "admitted to fetch", "refused"} | AT_ANY_TIME,
    "readmitting": {"admitted", "refused"} | AT_ANY_TIME,
    "fetching": {"fetch landed", "fetch given up"} | AT_ANY_TIME,
    "ready": {"started"} | AT_ANY_TIME,
    "computing": {"computed", "scored", "sampled", "finished"} | AT_ANY_TIME,
    "sending": {"finished", "sent"} | AT_ANY_TIME,
    "done": AT_ANY_TIME,
    "released": set(),
}


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in STATES for e in EVENTS if e not in LEGAL[s]])
def test_what_engine_and_transfers_cannot_send_in_a_state_raises(state: str, event: str) -> None:
    request = new_lifecycle(STATES[state])
    with pytest.raises(IllegalTransition, match=type(EVENTS[event]).__name__):
        request.on(EVENTS[event])
    assert request.state == STATES[state]


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in STATES for e in EVENTS if e in LEGAL[s]])
def test_everything_else_is_taken(state: str, event: str) -> None:
    new_lifecycle(STATES[state]).on(EVENTS[event])


def test_a_report_counts_what_was_fetched() -> None:
    counted = {"computed_tokens": 80, "checkpoints": (320, 384)}
    assert prefill_report("p0", TO_FETCH, 320, **counted) == PrefillReport(
        "p0", 64, 48, resumed_tokens=320, computed_tokens=80, checkpoints=(320, 384), fetched_tokens=272
    )
    assert prefill_report("p0", ADMITTED, 48, **counted) == PrefillReport(
        "p0", 64, 48, resumed_tokens=48, computed_tokens=80, checkpoints=(320, 384), fetched_tokens=0
    )
