"""States, events and instructions of one request on a decode node, between which `decode_node/lifecycle.py` leads.

Further events and replies are messages of `headrace/wire/messages.py`, and events of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headrace.engine.sequence import (
    AdmissionTimedOut,
    Admitted,
    Computed,
    Failed,
    Finished,
    Halted,
    Scored,
    Started,
)
from headrace.request import FinishReason, PromptLogprobs
from headrace.wire.messages import (
    GoOn,
    Halt,
    HaltReply,
    HandedOver,
    HandOver,
    LocalPrefill,
    Renew,
    Reservation,
    SessionFailed,
    Stop,
    Tokens,
    TransferReport,
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

# ---------------------------------------------------------------- states


@dataclass(frozen=True)
class Receiving:
    """A session is open in which a prefill node sends the prompt's blocks and state."""

    admitted: Admitted
    nonce: int


@dataclass(frozen=True)
class Interrupted:
    """The session failed and the router knows; it may renew it."""

    admitted: Admitted
    nonce: int


@dataclass(frozen=True)
class Renewing:
    """The session is being cancelled; the next one opens when nothing of this one can land any more."""

    admitted: Admitted
    nonce: int


@dataclass(frozen=True)
class Running:
    """The engine has the prompt's state, or computes it, and generates."""

    admitted: Admitted


@dataclass(frozen=True)
class Orphaned:
    """As Running, but the router is lost. What the engine reports waits until another router continues the request."""

    admitted: Admitted


@dataclass(frozen=True)
class Standing:
    """The engine computes nothing of it, so that it can be handed over; blocks and state of `computed` are final."""

    admitted: Admitted
    computed: Computed


@dataclass(frozen=True)
class HandingOver:
    """Blocks and state are on their way to another decode node."""


DecodeState: TypeAlias = (
    Admitting | Fetching | Readmitting | Receiving | Interrupted | Renewing | Running | Orphaned
    | Standing | HandingOver | Done | Released
)  # fmt: skip

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class SessionLanded:
    """All blocks and the state have landed, verified. `first_token`: sampled by the prefill node."""

    nonce: int
    first_token: int
    report: TransferReport


@dataclass(frozen=True)
class RouterLost:
    """The call of a resumable request broke, and the router had not abandoned it."""


@dataclass(frozen=True)
class Adopted:
    """Another router continues the request.

    num_prompt_tokens   of the request: none of them is computed for this router
    answer              the tokens that it has not shown to its client
    """

    num_prompt_tokens: int
    answer: Tokens


@dataclass(frozen=True)
class StateSent:
    """The network has taken over everything that goes to the other decode node."""


DecodeInput: TypeAlias = (
    Admitted | AdmissionTimedOut | Started | Computed | Scored | Tokens | Finished | Halted | Failed  # from the engine
    | SessionLanded | SessionFailed  # from the session; each session ends in one of them
    | StateSent  # from the transfer to another decode node
    | FetchLanded | FetchGivenUp  # from the fetch
    | Renew | Stop | Halt | HandOver | GoOn | CallEnded | RouterLost | Adopted  # from the router
    | CallBroken  # by a command that cannot be read, a session of another version, or a transfer that failed
)  # fmt: skip

# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class CountAdmission:
    """Record what the request found in the cache."""

    admitted: Admitted


@dataclass(frozen=True)
class OpenSession:
    """Expect a transfer of what `admitted` has no blocks for, and send its Reservation to the router."""

    admitted: Admitted
    nonce: int


@dataclass(frozen=True)
class CancelSession:
    """Cancel the open session. It still reports how it ended: it may land before the cancellation takes effect."""


@dataclass(frozen=True)
class RunDecode:
    """Have the engine generate, starting after `first_token`."""

    first_token: int


@dataclass(frozen=True)
class FinishAnswer:
    """Have the engine end the answer now. Without effect on a request that the engine does not run yet."""


@dataclass(frozen=True)
class HaltAnswer:
    """Have the engine stop decoding, and report Halted."""


@dataclass(frozen=True)
class ResumeAnswer:
    """Have the engine decode on."""


@dataclass(frozen=True)
class SendRequest:
    """Send blocks and state of the `computed` tokens to another decode node, with the newest token as the first."""

    reservation: Reservation
    computed: Computed


@dataclass(frozen=True)
class CancelSending:
    """Cancel that transfer, unless it is complete."""


@dataclass(frozen=True)
class ReplyDecoded:
    """Send DecodeDone, the last message, to the router; see `decode_report`."""

    reason: FinishReason
    admitted: Admitted


DecodeReply: TypeAlias = (
    LocalPrefill | SessionFailed | TransferReport | Tokens | PromptLogprobs | HaltReply | HandedOver
)  # fmt: skip
DecodeInstruction: TypeAlias = (
    CountAdmission | OpenSession | CancelSession | RunDecode | FinishAnswer
    | StartFetch | CancelFetch | ResumePrefill | PrefillLocally
    | HaltAnswer | ResumeAnswer | SendRequest | CancelSending
    | Reply[DecodeReply] | ReplyDecoded | Refuse | Fail | Release
)  # fmt: skip
