"""What sessions are told (events) and what they answer (instructions): plain values."""

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
    """The last token is sampled: the state is final."""


@dataclass(frozen=True, slots=True)
class MessageSent:
    """The transport took the whole message over. A short message may be done before a long earlier one."""

    index: int


@dataclass(frozen=True, slots=True)
class EnvelopeArrived:
    """`index` is that of the tag it came under."""

    index: int
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class PayloadAnnounced:
    """A payload waits to be received: its size is known, its bytes are not here yet."""

    index: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PayloadArrived:
    """The payload lies in a staging buffer, whose bytes are neither verified nor landed yet: the next may come."""

    index: int


@dataclass(frozen=True, slots=True)
class PayloadChecked:
    """Does the digest in its envelope agree with what lies in staging? One payload after the other, as they arrived."""

    index: int
    digest_ok: bool


@dataclass(frozen=True, slots=True)
class MessageLanded:
    """The message is in its blocks or its slot."""

    index: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


@dataclass(frozen=True, slots=True)
class Cancelled:
    pass


@dataclass(frozen=True, slots=True)
class Broken:
    """Something else ended it: bytes that are no envelope, or an error on this side."""

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
    """Pack this message into staging and send it; messages are released in order."""

    message: PlannedMessage


@dataclass(frozen=True, slots=True)
class ReceivePayload:
    """Receive the announced payload into a staging buffer of this session, exactly this long."""

    message: PlannedMessage


@dataclass(frozen=True, slots=True)
class Land:
    """Scatter this verified message; one at a time, in this order."""

    message: PlannedMessage


@dataclass(frozen=True, slots=True)
class CompleteSession:
    pass


@dataclass(frozen=True, slots=True)
class FailSession:
    cause: Cause
    reason: str


SenderInstruction: TypeAlias = SendMessage | CompleteSession | FailSession
ReceiverInstruction: TypeAlias = ReceivePayload | Land | CompleteSession | FailSession
