"""Every way that one request can take through a decode node, by literals: events in, instructions out."""

from itertools import count

import pytest

from decode_node.events import (
    CancelSending,
    CancelSession,
    CountAdmission,
    DecodeInput,
    DecodeState,
    FinishAnswer,
    HandingOver,
    Interrupted,
    OpenSession,
    Receiving,
    Renewing,
    ReplyDecoded,
    RunDecode,
    Running,
    SessionLanded,
    Standing,
    StateSent,
)
from decode_node.lifecycle import DecodeLifecycle, decode_report, with_joined_tokens
from headrace.cache.hits import PrefixHit
from headrace.engine.sequence import AdmissionTimedOut, Admitted, Computed, Finished, Halted, Sampled, Scored
from headrace.request import FinishReason, PromptLogprobs, Token
from headrace.wire.messages import (
    DecodeReport,
    GoOn,
    Halt,
    HaltReply,
    HandOver,
    LocalPrefill,
    Renew,
    SessionFailed,
    Stop,
    Tokens,
)
from node_runtime.lifecycle import (
    Admitting,
    CallBroken,
    CallEnded,
    CancelFetch,
    Done,
    Fail,
    FetchGivenUp,
    Fetching,
    FetchLanded,
    PrefillLocally,
    Readmitting,
    Refuse,
    Release,
    Released,
    Reply,
    ResumePrefill,
    StartFetch,
)
from tests.support.node.decode_lifecycle import (
    COMPUTED,
    LOCAL,
    MOVED,
    REMOTE,
    RESERVED,
    SECOND,
    STATES,
    THIRD,
    UNREADABLE,
    new_lifecycle,
)
from transfer.protocol.errors import IllegalTransition


def test_a_prompt_from_a_prefill_node_is_received_and_then_decoded() -> None:
    request = new_lifecycle()
    assert request.on(REMOTE) == [CountAdmission(REMOTE), OpenSession(REMOTE, 1)]
    assert request.on(SessionLanded(1, 5, MOVED)) == [RunDecode(5), Reply(MOVED)]
    assert request.on(SECOND) == [Reply(SECOND)]
    assert request.on(THIRD) == [Reply(THIRD)]
    assert not request.is_over
    assert request.on(Finished(FinishReason.LENGTH)) == [ReplyDecoded(FinishReason.LENGTH, REMOTE)]
    assert request.is_over
    assert request.on(CallEnded()) == [Release()]
    assert request.state == Released()


def test_a_prompt_that_is_computed_here_opens_no_session() -> None:
    request = new_lifecycle()
    assert request.on(LOCAL) == [CountAdmission(LOCAL), Reply(LocalPrefill(48))]
    assert request.on(Computed(64)) == []
    for part in (PromptLogprobs(1, (-1.0, -2.0)), PromptLogprobs(3, (-3.0,))):
        assert request.on(Scored(part)) == [Reply(part)]
    assert request.on(SECOND) == [Reply(SECOND)]
    assert request.on(Finished(FinishReason.STOP)) == [ReplyDecoded(FinishReason.STOP, LOCAL)]
    assert request.on(CallEnded()) == [Release()]


ARRIVING = Admitted(PrefixHit(64, 16, 16), reused_tokens=64, state_arrives=True)


def computing_lifecycle() -> DecodeLifecycle:
    """A prompt for which nobody else was asked, so that a state which arrives is fetched."""
    return DecodeLifecycle(count(1).__next__, computes_here=True)


def test_a_prompt_that_is_computed_here_may_begin_with_a_fetch() -> None:
    request = computing_lifecycle()
    assert request.on(ARRIVING) == [CountAdmission(ARRIVING), StartFetch(ARRIVING)]
    assert request.on(FetchLanded(96)) == [ResumePrefill(96), Reply(LocalPrefill(96))]
    assert request.on(Computed(100)) == []
    assert request.on(SECOND) == [Reply(SECOND)]
    assert request.on(Finished(FinishReason.STOP)) == [ReplyDecoded(FinishReason.STOP, ARRIVING)]
    assert request.on(CallEnded()) == [Release()]


def test_after_a_failed_fetch_the_prompt_is_admitted_again_and_counts_once() -> None:
    request = computing_lifecycle()
    request.on(ARRIVING)
    assert request.on(FetchGivenUp()) == [PrefillLocally()]
    assert request.on(LOCAL) == [Reply(LocalPrefill(48))]
    assert request.state == Running(LOCAL)


def test_a_request_whose_fetched_prompt_finds_no_blocks_again_is_refused() -> None:
    request = computing_lifecycle()
    request.on(ARRIVING)
    request.on(FetchGivenUp())
    assert request.on(AdmissionTimedOut("no blocks")) == [Refuse("no blocks")]


def test_a_call_that_ends_cancels_its_fetch() -> None:
    request = computing_lifecycle()
    request.on(ARRIVING)
    assert request.on(Halt()) == [Reply(HaltReply(False))]
    assert request.on(CallEnded()) == [CancelFetch(), Release()]


def test_what_was_fetched_is_reported_beyond_the_nodes_own_checkpoint() -> None:
    report = decode_report("n0", ARRIVING, computed_tokens=4, checkpoints=(), resumed_tokens=96, drafts=(5, 3))
    assert report == DecodeReport("n0", 64, 16, "resumed", 4, (), 80, drafted_tokens=5, accepted_tokens=3)


def test_a_request_that_finds_no_blocks_is_refused() -> None:
    request = new_lifecycle()
    assert request.on(AdmissionTimedOut("no blocks before the deadline")) == [Refuse("no blocks before the deadline")]
    assert request.on(CallEnded()) == [Release()]


def test_the_first_token_may_be_the_last() -> None:
    request = new_lifecycle(Receiving(REMOTE, 1))
    assert request.on(SessionLanded(1, 5, MOVED)) == [RunDecode(5), Reply(MOVED)]
    assert request.on(Finished(FinishReason.STOP)) == [ReplyDecoded(FinishReason.STOP, REMOTE)]


def test_a_failed_session_is_reported_and_renewed_with_another_nonce() -> None:
    request = new_lifecycle(Receiving(REMOTE, 1))
    failed = SessionFailed(1, "peer_lost: eof")
    assert request.on(failed) == [Reply(failed)]
    assert request.state == Interrupted(REMOTE, 1)
    assert request.on(Renew(1)) == [OpenSession(REMOTE, 2)]
    assert request.on(SessionLanded(2, 5, MOVED)) == [RunDecode(5), Reply(MOVED)]


def test_a_session_that_has_not_failed_yet_ends_before_the_next_one_opens() -> None:
    request = new_lifecycle(Receiving(REMOTE, 1))
    assert request.on(Renew(1)) == [CancelSession()]
    assert request.state == Renewing(REMOTE, 1)
    assert request.on(SessionFailed(1, "cancelled: by us")) == [OpenSession(REMOTE, 2)], "the router asked for it"
    assert request.state == Receiving(REMOTE, 2)


def test_a_session_that_lands_while_it_is_cancelled_has_landed() -> None:
    request = new_lifecycle(Receiving(REMOTE, 1))
    assert request.on(Renew(1)) == [CancelSession()]
    assert request.on(SessionLanded(1, 5, MOVED)) == [RunDecode(5), Reply(MOVED)]
    assert request.state == Running(REMOTE)


@pytest.mark.parametrize("state", [s for s in STATES.values() if s not in (Released(), Interrupted(REMOTE, 1))])
def test_a_renewal_is_ignored_unless_it_names_the_session_in_progress(state: DecodeState) -> None:
    failed_nonce = 2 if isinstance(state, Receiving) else 1
    request = new_lifecycle(state)
    assert request.on(Renew(failed_nonce)) == []
    assert request.state == state


def test_a_renewal_of_an_older_session_is_ignored() -> None:
    request = new_lifecycle(Interrupted(REMOTE, 2))
    assert request.on(Renew(1)) == []
    assert request.state == Interrupted(REMOTE, 2)


@pytest.mark.parametrize("name", [name for name in STATES if name not in ("handing over", "done", "released")])
def test_a_stop_always_reaches_the_engine(name: str) -> None:
    """Even while this side has not heard of the admission: the engine may run the request already."""
    request = new_lifecycle(STATES[name])
    assert request.on(Stop()) == [FinishAnswer()]
    assert request.state == STATES[name]


def test_a_stop_that_crosses_with_the_end_changes_nothing() -> None:
    request = new_lifecycle(Done())
    assert request.on(Stop()) == []


@pytest.mark.parametrize("name", [name for name in STATES if name not in ("done", "released")])
def test_a_command_that_cannot_be_read_fails_the_call_in_every_state(name: str) -> None:
    request = new_lifecycle(STATES[name])
    assert request.on(CallBroken(UNREADABLE)) == [Fail(UNREADABLE)]
    assert request.state == STATES[name], "its end gives back what that state holds"


def test_a_command_that_cannot_be_read_changes_nothing_after_the_end() -> None:
    assert new_lifecycle(Done()).on(CallBroken(UNREADABLE)) == []


@pytest.mark.parametrize(
    ("state", "instructions"),
    [
        (Admitting(), [Release()]),
        (Fetching(REMOTE), [CancelFetch(), Release()]),
        (Readmitting(), [Release()]),
        (Receiving(REMOTE, 1), [CancelSession(), Release()]),
        (Interrupted(REMOTE, 1), [Release()]),
        (Renewing(REMOTE, 1), [CancelSession(), Release()]),
        (Running(REMOTE), [Release()]),
        (Running(LOCAL), [Release()]),
        (Standing(LOCAL, COMPUTED), [Release()]),
        (HandingOver(), [CancelSending(), Release()]),
        (Done(), [Release()]),
    ],
    ids=str,
)
def test_a_call_that_ends_gives_everything_back_in_every_state(state: DecodeState, instructions: list) -> None:
    request = new_lifecycle(state)
    assert request.on(CallEnded()) == instructions
    assert request.state == Released()


EVENTS: dict[str, DecodeInput] = {
    "admitted": REMOTE,
    "admitted to compute": LOCAL,
    "refused": AdmissionTimedOut("late"),
    "computed": Computed(64),
    "scored": Scored(PromptLogprobs(1, ())),
    "tokens": SECOND,
    "finished": Finished(FinishReason.STOP),
    "landed": SessionLanded(1, 5, MOVED),
    "failed": SessionFailed(1, "digest"),
    "another landed": SessionLanded(2, 5, MOVED),
    "another failed": SessionFailed(2, "digest"),
    "fetched": FetchLanded(96),
    "not fetched": FetchGivenUp(),
    "halted": Halted(COMPUTED),
    "sent": StateSent(),
    "ended": CallEnded(),
    "halt": Halt(),
    "hand over": HandOver(RESERVED),
    "go on": GoOn(),
    "renew": Renew(1),
    "stop": Stop(),
    "broken": CallBroken(UNREADABLE),
}
ADMISSION = {"admitted", "admitted to compute", "refused"}
ENGINE = {"computed", "scored", "tokens", "finished", "halted"}
OUTCOME = {"landed", "failed"}
COMMANDS = {"ended", "renew", "stop", "broken", "halt", "hand over", "go on"}
LEGAL = {
    "admitting": ADMISSION | COMMANDS,
    "fetching": {"fetched", "not fetched"} | COMMANDS,
    "readmitting": ADMISSION | COMMANDS,
    "receiving": OUTCOME | COMMANDS,
    "interrupted": COMMANDS,
    "renewing": OUTCOME | COMMANDS,
    "running": ENGINE | COMMANDS,
    "standing": {"finished"} | COMMANDS,
    "handing over": {"sent", "finished"} | COMMANDS,
    "done": COMMANDS,
    "released": set(),
}


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in STATES for e in EVENTS if e not in LEGAL[s]])
def test_what_engine_and_session_cannot_send_in_a_state_raises(state: str, event: str) -> None:
    request = new_lifecycle(STATES[state])
    with pytest.raises(IllegalTransition, match=type(EVENTS[event]).__name__):
        request.on(EVENTS[event])
    assert request.state == STATES[state]


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in STATES for e in EVENTS if e in LEGAL[s]])
def test_everything_else_is_taken(state: str, event: str) -> None:
    new_lifecycle(STATES[state]).on(EVENTS[event])


def test_tokens_that_were_sampled_one_after_another_travel_together() -> None:
    sampled = [Sampled(Token(1), None), Sampled(Token(2), None), Sampled(Token(3), FinishReason.STOP)]
    finished = Finished(FinishReason.STOP)
    assert with_joined_tokens([*sampled, finished]) == [
        Tokens((Token(1), Token(2), Token(3)), FinishReason.STOP),
        finished,
    ]
    assert with_joined_tokens([sampled[0], Stop(), sampled[1]]) == [
        Tokens((Token(1),)),
        Stop(),
        Tokens((Token(2),)),
    ]
    assert with_joined_tokens([REMOTE, Renew(1), Renew(1)]) == [REMOTE, Renew(1), Renew(1)]


def test_a_report_says_where_the_state_came_from() -> None:
    from_nothing = Admitted(PrefixHit(0, 0, 0), reused_tokens=0, state_arrives=False)
    counted = {"computed_tokens": 12, "checkpoints": (48, 64)}
    assert [decode_report("d0", admitted, **counted) for admitted in (REMOTE, LOCAL, from_nothing)] == [
        DecodeReport("d0", 64, 0, "received", 12, (48, 64)),
        DecodeReport("d0", 64, 48, "resumed", 12, (48, 64)),
        DecodeReport("d0", 0, 0, "computed", 12, (48, 64)),
    ]
