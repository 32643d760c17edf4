"""Events and instructions of `router/requests/lifecycle.py`.

The nodes' messages of `headrace/wire/messages.py` are events, too; the others are here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.request import FinishReason, PromptLogprobs, Token
from headrace.wire import messages as m
from headrace.wire.errors import NodeError
from router.errors import ApiError

# ---------------------------------------------------------------- events beside the nodes' messages


@dataclass(frozen=True)
class DecodeStarted:
    """A decode call was opened."""

    node: str


@dataclass(frozen=True)
class PrefillStarted:
    """A prefill call was opened; `nonce` None: without a transfer."""

    node: str
    nonce: int | None


@dataclass(frozen=True)
class PrefillFailed:
    """A prefill call or its transfer failed. `cause` None: no prefill node is left to try."""

    nonce: int | None
    cause: NodeError | None


@dataclass(frozen=True)
class DecodeLost:
    """A decode call failed."""

    cause: NodeError


@dataclass(frozen=True)
class StopFound:
    """The text contains a stop string: no more tokens are wanted."""


@dataclass(frozen=True)
class GaveUp:
    """The router ends the request: its deadline passed, or the client has left."""

    cause: ApiError


Event = (
    DecodeStarted | PrefillStarted | PrefillFailed | DecodeLost | StopFound | GaveUp
    | m.DecodeEvent | m.PrefillEvent
)  # fmt: skip

# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class StartPrefill:
    """Open a prefill call for this reservation. `first_token`: what the client has already seen."""

    reservation: m.Reservation
    first_token: int | None


@dataclass(frozen=True)
class SendRenew:
    """Cancel the prefill call of this nonce and ask the decode node for a fresh one."""

    failed_nonce: int


@dataclass(frozen=True)
class SendStop:
    """Ask the decode node to finish now and report."""


@dataclass(frozen=True)
class Show:
    """Send these tokens to the client."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class ShowPrompt:
    """Send the logprobs of the prompt's next tokens to the client; before those at 1, the first token."""

    logprobs: PromptLogprobs


@dataclass(frozen=True)
class StartOver:
    """Cancel every call and begin again, with the prompt and the tokens so far."""


@dataclass(frozen=True)
class FinishRequest:
    """The answer is complete."""

    reason: FinishReason


@dataclass(frozen=True)
class FailRequest:
    """The request ends without its whole answer."""

    cause: ApiError


Instruction = StartPrefill | SendRenew | SendStop | Show | ShowPrompt | StartOver | FinishRequest | FailRequest
