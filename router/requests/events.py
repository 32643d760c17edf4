"""What can happen to a request, and what to do about it: the words of `router/requests/lifecycle.py`.

The messages of `headrace/wire/messages.py` are events as they are; here are the others, and the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.request import FinishReason, Token
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
    """A prefill call was opened; `nonce` None: nothing to hand over."""

    node: str
    nonce: int | None


@dataclass(frozen=True)
class PrefillFailed:
    """`cause` None: no prefill node is left to try."""

    nonce: int | None
    cause: NodeError | None


@dataclass(frozen=True)
class DecodeLost:
    cause: NodeError


@dataclass(frozen=True)
class StopFound:
    """The text holds a stop string: what comes after it is not wanted."""


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
    """Open a prefill call for this reservation."""

    reservation: m.Reservation
    first_token: int | None


@dataclass(frozen=True)
class SendRenew:
    """Drop the prefill call of this nonce, and ask the decode node for a fresh one."""

    failed_nonce: int


@dataclass(frozen=True)
class SendStop:
    """Tell the decode node to finish."""


@dataclass(frozen=True)
class Show:
    """Give the client these tokens."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class ShowPrompt:
    """Give the client the prompt's logprobs."""

    logprobs: m.PromptLogprobs


@dataclass(frozen=True)
class StartOver:
    """Leave every call and begin again, with prompt and tokens so far."""


@dataclass(frozen=True)
class FinishRequest:
    reason: FinishReason


@dataclass(frozen=True)
class FailRequest:
    cause: ApiError


Instruction = StartPrefill | SendRenew | SendStop | Show | ShowPrompt | StartOver | FinishRequest | FailRequest
