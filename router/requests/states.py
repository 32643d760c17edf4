"""States of a request: each holds exactly the data that its next event needs. `router/requests/lifecycle.py` moves
between them.

Queued -> Reserved -> Prefilling -> Moving -> Decoding -> Completed    a prefill node computes the prompt
                      Prefilling -> AwaitingFirstToken -> Decoding     ... and its transfer overtakes its first token
Queued -> PrefillingLocally -> Decoding -> Completed                   the decode node computes the prompt
Queued -> PrefillingAlone -> Completed                                 no decode node is needed
Reserved, Prefilling, Moving -> AwaitingRenewal -> Reserved            the prefill failed: repeated for the same request
Decoding -> Relocating -> Moving -> Decoding                           another decode node receives blocks and state
all but Completed and Failed -> Migrating                              the attempt failed: begin again on other nodes
all but Completed and Failed -> Failed
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, TypeAlias

from headrace.request import FinishReason, Token
from router.errors import ApiError


class RequestPhase(Enum):
    """A request's state as /cluster and /metrics show it."""

    __hash__ = object.__hash__  # Enum's own is Python: each request asks for it some fifty times

    QUEUED = "queued"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    MOVING = "moving"
    DECODING = "decoding"
    MIGRATING = "migrating"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Queued:
    """No node has accepted the request yet."""

    phase: ClassVar = RequestPhase.QUEUED


@dataclass(frozen=True)
class Migrating:
    """The last attempt failed; no node has accepted the next one yet."""

    phase: ClassVar = RequestPhase.MIGRATING


@dataclass(frozen=True)
class Reserved:
    """The decode node expects the transfer `nonce`. `first_token`: shown by an earlier prefill of this attempt."""

    nonce: int
    first_token: int | None
    phase: ClassVar = RequestPhase.RESERVED


@dataclass(frozen=True)
class Prefilling:
    """A prefill node computes the prompt; its first token has not arrived."""

    nonce: int
    phase: ClassVar = RequestPhase.PREFILLING


@dataclass(frozen=True)
class AwaitingFirstToken:
    """The transfer has landed and the decode node runs, but the prefill node's first token has not arrived.

    held        tokens of the decode node, to be shown after the first one
    finish      comes with the last of them
    is_decoded  the decode node has reported and ended its call
    """

    nonce: int
    held: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    is_decoded: bool = False
    phase: ClassVar = RequestPhase.PREFILLING


@dataclass(frozen=True)
class Moving:
    """The first token is there: shown, or held back until the next one. The transfer has not landed.

    from_decode  a decode node sends, on which the request has run: if that fails, a prefill node repeats it
    """

    nonce: int
    first_token: int
    from_decode: bool = False
    phase: ClassVar = RequestPhase.MOVING


@dataclass(frozen=True)
class AwaitingRenewal:
    """The prefill failed; the decode node is asked for a fresh nonce. `phase` is still that of the failure."""

    first_token: int | None
    phase: RequestPhase


@dataclass(frozen=True)
class PrefillingLocally:
    """The decode node computes the prompt itself."""

    phase: ClassVar = RequestPhase.PREFILLING


@dataclass(frozen=True)
class PrefillingAlone:
    """A prefill node computes the prompt of a request that needs no decode node.

    finish   the reason that came with the only token; None until it is shown
    """

    finish: FinishReason | None = None
    phase: ClassVar = RequestPhase.PREFILLING


@dataclass(frozen=True)
class Decoding:
    """The decode node's tokens are shown as they come.

    finish      came with the last token: only the node's report is missing
    is_stopped  a stop string was found: no later token is shown
    is_halting  the node is asked to halt, so that the request can move
    """

    finish: FinishReason | None = None
    is_stopped: bool = False
    is_halting: bool = False
    phase: ClassVar = RequestPhase.DECODING


@dataclass(frozen=True)
class Relocating:
    """The decode node `sender` has halted the request after `newest_token`; no other one has reserved for it yet."""

    sender: str | None
    newest_token: int
    phase: ClassVar = RequestPhase.MIGRATING


@dataclass(frozen=True)
class Completed:
    """The client has the whole answer."""

    finish: FinishReason
    phase: ClassVar = RequestPhase.DONE


@dataclass(frozen=True)
class Failed:
    """The request ended without its whole answer."""

    cause: ApiError
    phase: ClassVar = RequestPhase.FAILED


RequestState: TypeAlias = (
    Queued
    | Migrating
    | Reserved
    | Prefilling
    | AwaitingFirstToken
    | Moving
    | AwaitingRenewal
    | PrefillingLocally
    | PrefillingAlone
    | Decoding
    | Relocating
    | Completed
    | Failed
)
