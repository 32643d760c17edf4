"""Events that sessions take, and instructions that they return: plain values."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from transfer.protocol.envelope import Envelope
from transfer.protocol.plan import PlannedMessage


class Cause(StrEnum):
    """Why a session failed; the label of the failure counter."""

    PEER_LOST = "peer_lost"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    WRONG_MESSAGE = "wrong_message"
    WRONG_ORDER = "wrong_order"
    WRONG_SIZE = "wrong_size"
    WRONG_DIGEST = "wrong_digest"
    MALFORMED = "malformed"
    LOCAL_ERROR = "local_error"


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class TokensComputed:
    """Prefill has computed the prompt's first `num_tokens` tokens, counted from the prompt's start."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class StateFinal:
    """The prompt is computed and the first token sampled: the state will not change any more."""


@dataclass(frozen=True, slots=True)
class MessageSent:
    """The transport has taken over the whole message. A short message may be done before a long earlier one."""

    index: int


@dataclass(frozen=True, slots=True)
class EnvelopeArrived:
    """An envelope whose MAC is right has arrived. `index` is that of its tag."""

    index: int
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class PayloadAnnounced:
    """A payload waits to be received: its size is known, its bytes have not arrived."""

    index: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PayloadArrived:
    """The payload is in a staging buffer, neither verified nor landed: the next one may come."""

    index: int


@dataclass(frozen=True, slots=True)
class PayloadChecked:
    """The payload in staging was compared with the digest in its envelope; in order of arrival."""

    index: int
    digest_ok: bool


@dataclass(frozen=True, slots=True)
class MessageLanded:
    """The message is in its blocks and slot."""

    index: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to the peer broke, or could not be made."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The session's deadline, or an operation's, has passed."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """This side cancelled the session."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Bytes that are no envelope arrived, or this side failed."""

    cause: Cause
    reason: str


Interruption: TypeAlias = PeerLost | DeadlinePassed | Cancelled | Broken
SenderEvent: TypeAlias = TokensComputed | StateFinal | MessageSent | Interruption
ReceiverEvent: TypeAlias = (
    EnvelopeArrived | PayloadAnnounced | PayloadArrived | PayloadChecked | MessageLanded | Interruption
)


# ---------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Pack this message into staging and send it. Messages are released in order."""

    message: PlannedMessage


@dataclass(frozen=True, slots=True)
class ReceivePayload:
    """Receive the announced payload, of exactly this message's size, into a staging buffer."""

    message: PlannedMessage


@dataclass(frozen=True, slots=True)
class Land:
    """Scatter this verified message into its blocks and slot; one at a time, in this order."""

    message: PlannedMessage


@dataclass(frozen=True, slots=True)
class CompleteSession:
    """Every message was sent (sender), or has landed (receiver)."""


@dataclass(frozen=True, slots=True)
class FailSession:
    """Stop: nothing of the session lands or is sent any more."""

    cause: Cause
    reason: str


SenderInstruction: TypeAlias = SendMessage | CompleteSession | FailSession
ReceiverInstruction: TypeAlias = ReceivePayload | Land | CompleteSession | FailSession
