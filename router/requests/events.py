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


@dataclass(frozen=True)
class MoveWanted:
    """The request should go on at another decode node, with its blocks and state. Ignored unless it decodes."""


@dataclass(frozen=True)
class NoReceiver:
    """No other decode node has room for a halted request."""


@dataclass(frozen=True)
class SenderLost:
    """The call of the decode node failed from which the request moves."""

    cause: NodeError


@dataclass(frozen=True)
class NodeLeaves:
    """A node that serves the request stops working for it now, by nobody's fault."""


@dataclass(frozen=True)
class Judged:
    """The nodes were asked that the request has lost. `outlived`: names of those that live all the same."""

    outlived: frozenset[str]


Event = (
    DecodeStarted | PrefillStarted | PrefillFailed | DecodeLost | StopFound | GaveUp
    | MoveWanted | NoReceiver | SenderLost | NodeLeaves | Judged
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
class SendHalt:
    """Ask the decode node to sample no more tokens of the request, and to keep what it holds."""


@dataclass(frozen=True)
class FindReceiver:
    """Have another decode node reserve for the halted request, while this call stays open; or report NoReceiver."""


@dataclass(frozen=True)
class SendHandOver:
    """Ask the decode node that has halted the request to send it to this reservation."""

    reservation: m.Reservation


@dataclass(frozen=True)
class SendGoOn:
    """Ask the decode node that has halted the request to decode on; give the other one's call up."""


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


Instruction = (
    StartPrefill | SendRenew | SendStop | SendHalt | FindReceiver | SendHandOver | SendGoOn
    | Show | ShowPrompt | StartOver | FinishRequest | FailRequest
)  # fmt: skip
