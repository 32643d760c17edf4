"""Session of one transfer, as a pure state machine: events in, instructions out; it neither waits nor sends.

The first rule: only verified messages of exactly this nonce and this plan land, in order. Anything else fails the
session, and nothing lands after a failure. Outside faults (a lost peer, a flipped bit, a late message) are events; an
event that the caller should never have sent raises `IllegalTransition`. Events of work that was under way when the
session ended are ignored.

    sender    PLANNED -> MOVING -> COMPLETE          receiver  PLANNED -> MOVING -> COMPLETE (landed)
                 \\________\\-> FAILED                             \\________\\-> FAILED
"""

from enum import Enum, auto

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
    Interruption,
    Land,
    MessageLanded,
    MessageSent,
    PayloadAnnounced,
    PayloadArrived,
    PayloadChecked,
    PeerLost,
    ReceivePayload,
    ReceiverEvent,
    ReceiverInstruction,
    SenderEvent,
    SenderInstruction,
    SendMessage,
    StateFinal,
    TokensComputed,
)
from transfer.protocol.plan import TransferPlan


class SessionPhase(Enum):
    PLANNED = auto()
    MOVING = auto()
    COMPLETE = auto()
    FAILED = auto()


class _Session:
    """The part that both sides share: the phase, and how a session fails."""

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self.phase = SessionPhase.PLANNED

    @property
    def ended(self) -> bool:
        return self.phase in (SessionPhase.COMPLETE, SessionPhase.FAILED)

    def _interrupted(self, event: Interruption) -> list[FailSession]:
        if self.ended:
            return []
        match event:
            case PeerLost(reason):
                return self._fail(Cause.PEER_LOST, reason)
            case DeadlinePassed():
                return self._fail(Cause.DEADLINE, f"{self._progress()} at the session's deadline")
            case Cancelled():
                return self._fail(Cause.CANCELLED, f"cancelled with {self._progress()}")
            case Broken(cause, reason):
                return self._fail(cause, reason)

    def _fail(self, cause: Cause, reason: str) -> list[FailSession]:
        self.phase = SessionPhase.FAILED
        return [FailSession(cause, reason)]

    def _progress(self) -> str:
        raise NotImplementedError

    def _illegal(self, event: object) -> IllegalTransition:
        return IllegalTransition(f"{type(self).__name__} {self.phase.name}, {self._progress()}: got {event}")


class SenderSession(_Session):
    """The sending side: releases messages as the tokens that they need are computed.

    Only `StateFinal` releases the state. The session is complete when the transport has taken over every message. That
    the receiver has landed them is reported over the control plane.
    """

    def __init__(self, plan: TransferPlan) -> None:
        super().__init__(plan)
        self._tokens = 0
        self._finished = False
        self._released = 0
        self._sent: set[int] = set()

    def on(self, event: SenderEvent) -> list[SenderInstruction]:
        match event:
            case TokensComputed(num_tokens):
                return self._computed(event, num_tokens)
            case StateFinal():
                return self._finish(event)
            case MessageSent(index):
                return self._message_sent(event, index)
            case _:
                return [*self._interrupted(event)]

    def _computed(self, event: TokensComputed, num_tokens: int) -> list[SenderInstruction]:
        if self.phase is SessionPhase.FAILED:
            return []
        if self._finished or not self._tokens <= num_tokens <= self.plan.num_tokens:
            raise self._illegal(event)
        self._tokens = num_tokens
        return self._release()

    def _finish(self, event: StateFinal) -> list[SenderInstruction]:
        if self.phase is SessionPhase.FAILED:
            return []
        if self._finished or self._tokens != self.plan.num_tokens:
            raise self._illegal(event)
        self._finished = True
        return self._release()

    def _release(self) -> list[SenderInstruction]:
        sendable: list[SenderInstruction] = []
        for message in self.plan.messages[self._released :]:
            if not (self._finished if message.state_bytes else message.sendable_tokens <= self._tokens):
                break
            sendable.append(SendMessage(message))
        self._released += len(sendable)
        if sendable:
            self.phase = SessionPhase.MOVING
        return sendable

    def _message_sent(self, event: MessageSent, index: int) -> list[SenderInstruction]:
        if self.phase is SessionPhase.FAILED:
            return []
        if index in self._sent or index >= self._released:
            raise self._illegal(event)
        self._sent.add(index)
        if len(self._sent) < len(self.plan.messages):
            return []
        self.phase = SessionPhase.COMPLETE
        return [CompleteSession()]

    def _progress(self) -> str:
        return (
            f"{self._tokens} of {self.plan.num_tokens} tokens computed, {len(self._sent)} of "
            f"{len(self.plan.messages)} messages sent"
        )


class ReceiverSession(_Session):
    """The receiving side: verifies each message against the plan, and has it landed.

    Messages arrive strictly in order, the envelope first, and are verified and landed in that order. Verifying may lag
    behind arriving, and landing behind verifying. Nothing lands unverified, nor behind a failed message. A peer lost
    after its last byte has arrived does not matter.
    """

    def __init__(self, plan: TransferPlan) -> None:
        super().__init__(plan)
        self._arrived = 0
        self._verified = 0
        self._landed = 0
        self._envelope: Envelope | None = None
        self._receiving = False

    def on(self, event: ReceiverEvent) -> list[ReceiverInstruction]:
        match event:
            case EnvelopeArrived(index, envelope):
                return [*self._envelope_arrived(index, envelope)]
            case PayloadAnnounced(index, num_bytes):
                return self._payload_announced(index, num_bytes)
            case PayloadArrived(index):
                return self._payload_arrived(event, index)
            case PayloadChecked(index, digest_ok):
                return self._payload_checked(event, index, digest_ok)
            case MessageLanded(index):
                return self._message_landed(event, index)
            case PeerLost() if self._arrived == len(self.plan.messages):
                return []
            case _:
                return [*self._interrupted(event)]

    def _envelope_arrived(self, index: int, envelope: Envelope) -> list[FailSession]:
        if self.ended:
            return []
        whole = self._arrived == len(self.plan.messages)
        if whole or index != self._arrived or self._envelope is not None:
            return self._fail(Cause.WRONG_ORDER, f"envelope {index} arrived, {self._expected()}")
        planned = self.plan.messages[index]
        if not envelope.describes(self.plan.nonce, planned):
            return self._fail(
                Cause.WRONG_MESSAGE,
                f"{envelope} is not the planned {planned}: compare block_size, state dtype and model "
                "fingerprint of both nodes",
            )
        self.phase = SessionPhase.MOVING
        self._envelope = envelope
        return []

    def _payload_announced(self, index: int, num_bytes: int) -> list[ReceiverInstruction]:
        if self.ended:
            return []
        if index != self._arrived or self._envelope is None or self._receiving:
            return [*self._fail(Cause.WRONG_ORDER, f"payload {index} arrived, {self._expected()}")]
        planned = self.plan.messages[index]
        if num_bytes != planned.num_bytes:
            reason = f"payload {index} has {num_bytes} bytes, planned {planned.num_bytes}"
            return [*self._fail(Cause.WRONG_SIZE, reason)]
        self._receiving = True
        return [ReceivePayload(planned)]

    def _payload_arrived(self, event: PayloadArrived, index: int) -> list[ReceiverInstruction]:
        if self.ended:
            return []
        if not self._receiving or index != self._arrived:
            raise self._illegal(event)
        self._arrived += 1
        self._envelope = None
        self._receiving = False
        return []

    def _payload_checked(self, event: PayloadChecked, index: int, digest_ok: bool) -> list[ReceiverInstruction]:
        if self.ended:
            return []
        if index != self._verified or index >= self._arrived:
            raise self._illegal(event)
        if not digest_ok:
            return [
                *self._fail(Cause.WRONG_DIGEST, f"the digest of message {index} fits neither its bytes nor the plan")
            ]
        self._verified += 1
        return [Land(self.plan.messages[index])]

    def _message_landed(self, event: MessageLanded, index: int) -> list[ReceiverInstruction]:
        if self.phase is SessionPhase.FAILED:
            return []
        if index != self._landed or index >= self._verified:
            raise self._illegal(event)
        self._landed += 1
        if self._landed < len(self.plan.messages):
            return []
        self.phase = SessionPhase.COMPLETE
        return [CompleteSession()]

    def _expected(self) -> str:
        if self._arrived == len(self.plan.messages):
            return "but all messages had arrived: a duplicate"
        part = "envelope" if self._envelope is None else "end of payload" if self._receiving else "payload"
        return f"expected the {part} of message {self._arrived} of {len(self.plan.messages)}"

    def _progress(self) -> str:
        return f"{self._arrived} arrived and {self._landed} landed of {len(self.plan.messages)} messages"
