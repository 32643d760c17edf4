"""Every transition of both session machines, by literals."""

from dataclasses import replace

import pytest

from tests.support.transfer.transfer_plans import small_plan
from transfer.protocol.envelope import Envelope
from transfer.protocol.errors import IllegalTransition
from transfer.protocol.events import (
    Broken,
    Cancelled,
    Cause,
    CompleteSession,
    DeadlinePassed,
    EnvelopeArrived,
    FailSession,
    Land,
    MessageLanded,
    MessageSent,
    PayloadAnnounced,
    PayloadArrived,
    PayloadChecked,
    PeerLost,
    ReceivePayload,
    SendMessage,
    StateFinal,
    TokensComputed,
)
from transfer.protocol.session import ReceiverSession, SenderSession, SessionPhase

PLAN = small_plan()
FIRST, SECOND, STATE = PLAN.messages
ENVELOPES = [Envelope.of(PLAN.nonce, 5, message) for message in PLAN.messages]

INTERRUPTIONS = [
    (PeerLost("eof"), Cause.PEER_LOST),
    (DeadlinePassed(), Cause.DEADLINE),
    (Cancelled(), Cause.CANCELLED),
    (Broken(Cause.MALFORMED, "magic"), Cause.MALFORMED),
]


def causes(instructions):
    return [instruction.cause for instruction in instructions if isinstance(instruction, FailSession)]


# ---------------------------------------------------------------- sender


def test_messages_are_released_as_their_tokens_are_computed():
    session = SenderSession(PLAN)
    assert session.phase is SessionPhase.PLANNED
    assert session.on(TokensComputed(15)) == []
    assert session.phase is SessionPhase.PLANNED
    assert session.on(TokensComputed(16)) == [SendMessage(FIRST)]
    assert session.phase is SessionPhase.MOVING
    assert session.on(TokensComputed(16)) == []
    assert session.on(TokensComputed(17)) == []
    assert session.on(TokensComputed(18)) == [SendMessage(SECOND)]
    assert session.on(StateFinal()) == [SendMessage(STATE)]
    assert session.on(MessageSent(0)) == []
    assert session.on(MessageSent(1)) == []
    assert session.on(MessageSent(2)) == [CompleteSession()]
    assert session.phase is SessionPhase.COMPLETE


def test_one_chunk_releases_all_attention_but_never_the_state():
    session = SenderSession(PLAN)
    assert session.on(TokensComputed(18)) == [SendMessage(FIRST), SendMessage(SECOND)]
    assert session.on(MessageSent(0)) == []
    assert session.on(MessageSent(1)) == []
    assert session.phase is SessionPhase.MOVING


def test_a_short_message_may_be_sent_before_a_long_one():
    session = SenderSession(PLAN)
    session.on(TokensComputed(18))
    session.on(StateFinal())
    assert session.on(MessageSent(2)) == []
    assert session.on(MessageSent(0)) == []
    assert session.on(MessageSent(1)) == [CompleteSession()]


def test_a_state_only_plan_waits_for_the_finish():
    plan = small_plan(num_tokens=16, first_block=4)
    session = SenderSession(plan)
    assert session.on(TokensComputed(16)) == []
    assert session.on(StateFinal()) == [SendMessage(plan.messages[0])]
    assert session.on(MessageSent(0)) == [CompleteSession()]


@pytest.mark.parametrize(
    ("before", "illegal"),
    [
        ([TokensComputed(8)], TokensComputed(7)),
        ([], TokensComputed(19)),
        ([], StateFinal()),
        ([TokensComputed(17)], StateFinal()),
        ([TokensComputed(18), StateFinal()], StateFinal()),
        ([TokensComputed(18), StateFinal()], TokensComputed(18)),
        ([], MessageSent(0)),
        ([TokensComputed(16)], MessageSent(1)),
        ([TokensComputed(18), MessageSent(0)], MessageSent(0)),
        ([TokensComputed(18), StateFinal(), *map(MessageSent, range(3))], MessageSent(2)),
        ([TokensComputed(18), StateFinal(), *map(MessageSent, range(3))], TokensComputed(18)),
    ],
)
def test_what_a_sender_cannot_do_raises(before, illegal):
    session = SenderSession(PLAN)
    for event in before:
        session.on(event)
    with pytest.raises(IllegalTransition):
        session.on(illegal)


@pytest.mark.parametrize(("event", "cause"), INTERRUPTIONS)
@pytest.mark.parametrize("before", [[], [TokensComputed(16)], [TokensComputed(18), StateFinal()]])
def test_an_interrupted_sender_fails_once_and_then_ignores_everything(before, event, cause):
    session = SenderSession(PLAN)
    for earlier in before:
        session.on(earlier)
    assert causes(session.on(event)) == [cause]
    assert session.phase is SessionPhase.FAILED
    late = [TokensComputed(18), StateFinal(), MessageSent(0), *(event for event, _ in INTERRUPTIONS)]
    assert [session.on(event) for event in late] == [[]] * len(late)


@pytest.mark.parametrize(("event", "_"), INTERRUPTIONS)
def test_a_complete_sender_cannot_be_interrupted(event, _):
    session = SenderSession(PLAN)
    for earlier in (TokensComputed(18), StateFinal(), *map(MessageSent, range(3))):
        session.on(earlier)
    assert session.on(event) == []
    assert session.phase is SessionPhase.COMPLETE


# ---------------------------------------------------------------- receiver


def arrival(index):
    """The events of one message that arrives as planned."""
    return [
        EnvelopeArrived(index, ENVELOPES[index]),
        PayloadAnnounced(index, PLAN.messages[index].num_bytes),
        PayloadArrived(index),
    ]


def verified(index):
    """And is what was sent."""
    return [*arrival(index), PayloadChecked(index, digest_ok=True)]


def receiver(*events):
    session = ReceiverSession(PLAN)
    for event in events:
        session.on(event)
    return session


WHOLE = [event for index in range(3) for event in (*verified(index), MessageLanded(index))]


def test_messages_land_in_order_and_the_state_completes():
    session = ReceiverSession(PLAN)
    assert session.phase is SessionPhase.PLANNED
    assert [session.on(event) for event in WHOLE] == [
        [], [ReceivePayload(FIRST)], [], [Land(FIRST)], [],
        [], [ReceivePayload(SECOND)], [], [Land(SECOND)], [],
        [], [ReceivePayload(STATE)], [], [Land(STATE)], [CompleteSession()],
    ]  # fmt: skip
    assert session.phase is SessionPhase.COMPLETE


def test_the_first_envelope_as_planned_is_the_sessions_acceptance():
    session = ReceiverSession(PLAN)
    assert session.on(EnvelopeArrived(0, ENVELOPES[0])) == []
    assert session.phase is SessionPhase.MOVING


def test_verifying_and_landing_may_lag_behind_arriving():
    session = receiver(*arrival(0), *arrival(1), *arrival(2))
    for index, message in enumerate(PLAN.messages):
        assert session.on(PayloadChecked(index, digest_ok=True)) == [Land(message)]
    assert session.phase is SessionPhase.MOVING
    assert session.on(MessageLanded(0)) == []
    assert session.on(MessageLanded(1)) == []
    assert session.on(MessageLanded(2)) == [CompleteSession()]


@pytest.mark.parametrize(
    ("before", "event", "cause"),
    [
        # out of order, duplicated, or without an envelope
        ([], EnvelopeArrived(1, ENVELOPES[1]), Cause.WRONG_ORDER),
        ([], PayloadAnnounced(0, 200), Cause.WRONG_ORDER),
        (arrival(0), EnvelopeArrived(0, ENVELOPES[0]), Cause.WRONG_ORDER),
        (arrival(0), PayloadAnnounced(0, 200), Cause.WRONG_ORDER),
        (arrival(0)[:1], EnvelopeArrived(0, ENVELOPES[0]), Cause.WRONG_ORDER),
        (arrival(0)[:1], PayloadAnnounced(1, 100), Cause.WRONG_ORDER),
        (arrival(0)[:2], PayloadAnnounced(0, 200), Cause.WRONG_ORDER),
        (arrival(0)[:2], EnvelopeArrived(1, ENVELOPES[1]), Cause.WRONG_ORDER),
        ([*arrival(0), *arrival(1), *arrival(2)], EnvelopeArrived(2, ENVELOPES[2]), Cause.WRONG_ORDER),
        ([*arrival(0), *arrival(1), *arrival(2)], EnvelopeArrived(3, ENVELOPES[2]), Cause.WRONG_ORDER),
        # an envelope that is not the planned one, field by field
        ([], EnvelopeArrived(0, replace(ENVELOPES[0], nonce=8)), Cause.WRONG_MESSAGE),
        ([], EnvelopeArrived(0, replace(ENVELOPES[0], index=1)), Cause.WRONG_MESSAGE),
        ([], EnvelopeArrived(0, replace(ENVELOPES[0], state_bytes=300)), Cause.WRONG_MESSAGE),
        ([], EnvelopeArrived(0, replace(ENVELOPES[0], first_block=1)), Cause.WRONG_MESSAGE),
        ([], EnvelopeArrived(0, replace(ENVELOPES[0], num_blocks=1)), Cause.WRONG_MESSAGE),
        ([], EnvelopeArrived(0, replace(ENVELOPES[0], attention_bytes=199)), Cause.WRONG_MESSAGE),
        # truncated, too long, or damaged
        (arrival(0)[:1], PayloadAnnounced(0, 199), Cause.WRONG_SIZE),
        (arrival(0)[:1], PayloadAnnounced(0, 201), Cause.WRONG_SIZE),
        (arrival(0), PayloadChecked(0, digest_ok=False), Cause.WRONG_DIGEST),
        ([*arrival(0), *arrival(1)[:2]], PayloadChecked(0, digest_ok=False), Cause.WRONG_DIGEST),
        ([*verified(0), *arrival(1), *arrival(2)], PayloadChecked(1, digest_ok=False), Cause.WRONG_DIGEST),
    ],
)
def test_anything_but_the_planned_message_fails_the_session(before, event, cause):
    session = receiver(*before)
    assert causes(session.on(event)) == [cause]
    assert session.phase is SessionPhase.FAILED


@pytest.mark.parametrize("events", [verified(0)[:done] for done in range(5)])
@pytest.mark.parametrize(("interruption", "cause"), INTERRUPTIONS)
def test_after_a_failure_nothing_lands(events, interruption, cause):
    session = receiver(*events)
    assert causes(session.on(interruption)) == [cause]
    late = [*WHOLE, *(event for event, _ in INTERRUPTIONS)]
    assert [session.on(event) for event in late] == [[]] * len(late)
    assert session.phase is SessionPhase.FAILED


def test_what_arrived_behind_a_damaged_message_never_lands():
    session = receiver(*verified(0), *arrival(1), *arrival(2))
    assert causes(session.on(PayloadChecked(1, digest_ok=False))) == [Cause.WRONG_DIGEST]
    assert session.on(PayloadChecked(2, digest_ok=True)) == []
    assert session.on(MessageLanded(0)) == []
    assert session.phase is SessionPhase.FAILED


def test_losing_the_peer_after_the_last_byte_is_no_loss():
    session = receiver(*verified(0), *arrival(1), *arrival(2), MessageLanded(0))
    assert session.on(PeerLost("eof")) == []
    assert session.on(PayloadChecked(1, digest_ok=True)) == [Land(SECOND)]
    assert session.on(MessageLanded(1)) == []
    assert session.on(PayloadChecked(2, digest_ok=True)) == [Land(STATE)]
    assert session.on(MessageLanded(2)) == [CompleteSession()]


@pytest.mark.parametrize("event", [Cancelled(), DeadlinePassed()])
def test_a_session_may_still_be_ended_while_its_last_message_lands(event):
    session = receiver(*WHOLE[:-1])
    assert len(causes(session.on(event))) == 1
    assert session.on(MessageLanded(2)) == []


@pytest.mark.parametrize(
    ("before", "illegal"),
    [
        ([], PayloadArrived(0)),
        (arrival(0)[:1], PayloadArrived(0)),
        (arrival(0)[:2], PayloadArrived(1)),
        (arrival(0), PayloadArrived(0)),
        *(([], PayloadChecked(0, digest_ok)) for digest_ok in (True, False)),
        *((arrival(0)[:2], PayloadChecked(0, digest_ok)) for digest_ok in (True, False)),
        *(([*arrival(0), *arrival(1)], PayloadChecked(1, digest_ok)) for digest_ok in (True, False)),
        *((verified(0), PayloadChecked(0, digest_ok)) for digest_ok in (True, False)),
        ([], MessageLanded(0)),
        (arrival(0)[:2], MessageLanded(0)),
        (arrival(0), MessageLanded(0)),
        ([*verified(0), *verified(1)], MessageLanded(1)),
        ([*verified(0), MessageLanded(0)], MessageLanded(0)),
        (WHOLE, MessageLanded(2)),
    ],
)
def test_what_a_receivers_driver_cannot_do_raises(before, illegal):
    session = receiver(*before)
    with pytest.raises(IllegalTransition):
        session.on(illegal)


@pytest.mark.parametrize("late", [*verified(2), *(event for event, _ in INTERRUPTIONS)])
def test_a_complete_session_ignores_what_comes_late(late):
    session = receiver(*WHOLE)
    assert session.on(late) == []
    assert session.phase is SessionPhase.COMPLETE


# ---------------------------------------------------------------- a retry: another plan, alike in all but its nonce


RETRY = small_plan(nonce=PLAN.nonce + 1)
RETRY_ENVELOPES = [Envelope.of(RETRY.nonce, 6, message) for message in RETRY.messages]


def test_a_retry_by_another_prefill_node_lands_whole_under_its_fresh_nonce():
    failed = receiver(*verified(0), MessageLanded(0))
    assert causes(failed.on(PeerLost("eof"))) == [Cause.PEER_LOST]
    retry = ReceiverSession(RETRY)
    for index, envelope in enumerate(RETRY_ENVELOPES):
        message = RETRY.messages[index]
        assert retry.on(EnvelopeArrived(index, envelope)) == []
        assert retry.on(PayloadAnnounced(index, message.num_bytes)) == [ReceivePayload(message)]
        assert retry.on(PayloadArrived(index)) == []
        assert retry.on(PayloadChecked(index, digest_ok=True)) == [Land(message)]
        assert retry.on(MessageLanded(index)) == ([CompleteSession()] if message is RETRY.messages[-1] else [])
    assert (failed.phase, retry.phase) == (SessionPhase.FAILED, SessionPhase.COMPLETE)


@pytest.mark.parametrize("index", range(3))
def test_a_late_message_of_the_failed_attempt_fails_a_retry_that_it_were_routed_to(index):
    """A `Demultiplexer` never does that; if it did, the nonce would keep its bytes out."""
    retry = ReceiverSession(RETRY)
    for earlier in range(index):
        message = RETRY.messages[earlier]
        for event in (
            EnvelopeArrived(earlier, RETRY_ENVELOPES[earlier]),
            PayloadAnnounced(earlier, message.num_bytes),
            PayloadArrived(earlier),
            PayloadChecked(earlier, digest_ok=True),
            MessageLanded(earlier),
        ):
            retry.on(event)
    assert causes(retry.on(EnvelopeArrived(index, ENVELOPES[index]))) == [Cause.WRONG_MESSAGE]
    assert retry.on(PayloadAnnounced(index, PLAN.messages[index].num_bytes)) == []


@pytest.mark.parametrize("interruption", [event for event, _ in INTERRUPTIONS])
def test_the_failed_attempts_own_late_messages_land_nowhere(interruption):
    failed = receiver(*arrival(0), interruption)
    assert [failed.on(event) for event in (*verified(0)[3:], *verified(1), *verified(2))] == [[]] * 9


def test_reasons_say_how_far_it_had_come():
    session = receiver(*verified(0), MessageLanded(0))
    assert session.on(DeadlinePassed()) == [
        FailSession(Cause.DEADLINE, "1 arrived and 1 landed of 3 messages at the session's deadline")
    ]
