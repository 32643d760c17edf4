"""One request on a decode node: events in, instructions out. `decode_node/role.py` obeys.

    Admitting -> Receiving -> Running -> Done    a prefill node computes the prompt and sends blocks and state
    Admitting -> Running -> Done                 this node computes the prompt
    Receiving -> Interrupted -> Receiving        the transfer failed, and the router asked for another session
    Receiving -> Renewing -> Receiving           the router asked for another session before this one had failed
    Running -> Orphaned -> Running               the router was lost, and another one continues the request

From any of them to Released when the router's call ends, with or without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from headrace.engine.sequence import (
    AdmissionTimedOut,
    Admitted,
    Computed,
    Event,
    Failed,
    Finished,
    Sampled,
    Scored,
    Started,
)
from headrace.request import FinishReason, PromptLogprobs, Token
from headrace.wire.messages import (
    DecodeReport,
    LocalPrefill,
    Renew,
    SessionFailed,
    Stop,
    Tokens,
    TransferReport,
)
from node_runtime.lifecycle import (
    Admitting,
    CallBroken,
    CallEnded,
    Done,
    Fail,
    Lifecycle,
    Refuse,
    Release,
    Released,
    Reply,
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


DecodeState: TypeAlias = Admitting | Receiving | Interrupted | Renewing | Running | Orphaned | Done | Released

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


DecodeInput: TypeAlias = (
    Admitted | AdmissionTimedOut | Started | Computed | Scored | Tokens | Finished | Failed  # from the engine
    | SessionLanded | SessionFailed  # from the session; each session ends in one of them
    | Renew | Stop | CallEnded | RouterLost | Adopted  # from the router
    | CallBroken  # by a command that cannot be read, or a session of another version
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
class ReplyDecoded:
    """Send DecodeDone, the last message, to the router; see `decode_report`."""

    reason: FinishReason
    admitted: Admitted


DecodeReply: TypeAlias = LocalPrefill | SessionFailed | TransferReport | Tokens | PromptLogprobs
DecodeInstruction: TypeAlias = (
    CountAdmission | OpenSession | CancelSession | RunDecode | FinishAnswer
    | Reply[DecodeReply] | ReplyDecoded | Refuse | Fail | Release
)  # fmt: skip


class DecodeLifecycle(Lifecycle[DecodeState]):
    """One request from its admission to its release. `new_nonce` names each session."""

    def __init__(self, new_nonce: Callable[[], int]) -> None:
        super().__init__(Admitting())
        self._new_nonce = new_nonce

    def on(self, event: DecodeInput) -> list[DecodeInstruction]:
        """Returns what to do about the event. Raises IllegalTransition."""
        if isinstance(self.state, Released):
            raise self._illegal(event)
        match event:
            case Tokens():  # first: the most frequent event
                self._expect(event, Running)
                return [Reply(event)]
            case Admitted():
                self._expect(event, Admitting)
                return self._admitted(event)
            case AdmissionTimedOut(message):
                self._expect(event, Admitting)
                return [Refuse(message)]
            case Started() | Computed():  # the progress of a prefill on this node
                self._expect(event, Running)
                return []
            case Scored(logprobs):
                self._expect(event, Running)
                return [Reply(logprobs)]
            case Finished(reason):
                admitted = self._expect(event, Running).admitted
                self.state = Done()
                return [ReplyDecoded(reason, admitted)]
            case SessionLanded():
                return self._session_landed(event)
            case SessionFailed():
                return self._session_failed(event)
            case Renew():
                return self._renew(event.failed_nonce)
            case Stop():
                # In any state: the engine may run the request already while its Admitted is on the way here.
                return [] if self.is_over else [FinishAnswer()]
            case CallBroken(error) | Failed(error):
                return [] if self.is_over else [Fail(error)]
            case RouterLost():
                return self._router_lost()
            case Adopted(num_prompt_tokens, answer):
                self.state = Running(self._expect(event, Orphaned).admitted)
                return [Reply(LocalPrefill(num_prompt_tokens)), *([Reply(answer)] if answer.tokens else [])]
            case CallEnded():
                return self._call_ended()
            case _:
                assert_never(event)

    def _admitted(self, admitted: Admitted) -> list[DecodeInstruction]:
        if admitted.state_arrives:
            return [CountAdmission(admitted), *self._open_session(admitted)]
        self.state = Running(admitted)
        return [CountAdmission(admitted), Reply(LocalPrefill(admitted.reused_tokens))]

    def _open_session(self, admitted: Admitted) -> list[DecodeInstruction]:
        self.state = Receiving(admitted, self._new_nonce())
        return [OpenSession(admitted, self.state.nonce)]

    def _session_landed(self, event: SessionLanded) -> list[DecodeInstruction]:
        match self.state:
            case Receiving(admitted, nonce) | Renewing(admitted, nonce) if nonce == event.nonce:
                self.state = Running(admitted)
                return [RunDecode(event.first_token), Reply(event.report)]
        raise self._illegal(event)

    def _session_failed(self, event: SessionFailed) -> list[DecodeInstruction]:
        match self.state:
            case Receiving(admitted, nonce) if nonce == event.nonce:
                self.state = Interrupted(admitted, nonce)
                return [Reply(event)]
            case Renewing(admitted, nonce) if nonce == event.nonce:
                return self._open_session(admitted)
        raise self._illegal(event)

    def _renew(self, failed_nonce: int) -> list[DecodeInstruction]:
        """Ignores a nonce that is not the current one, and a session that has landed meanwhile."""
        match self.state:
            case Interrupted(admitted, nonce) if nonce == failed_nonce:
                return self._open_session(admitted)
            case Receiving(admitted, nonce) if nonce == failed_nonce:
                self.state = Renewing(admitted, nonce)
                return [CancelSession()]
        return []

    def _router_lost(self) -> list[DecodeInstruction]:
        if not isinstance(self.state, Running):
            return self._call_ended()
        self.state = Orphaned(self.state.admitted)
        return []

    def _call_ended(self) -> list[DecodeInstruction]:
        is_open = isinstance(self.state, Receiving | Renewing)
        self.state = Released()
        return [CancelSession(), Release()] if is_open else [Release()]


def with_joined_tokens(events: Iterable[Event | DecodeInput]) -> list[DecodeInput]:
    """Returns the events, with tokens that the engine sampled one after another as one: they travel in one message."""
    joined: list[DecodeInput] = []
    tokens: list[Token] = []
    finish: FinishReason | None = None
    for event in events:
        if isinstance(event, Sampled):
            tokens.append(event.token)
            finish = event.finish
            continue
        if tokens:
            joined.append(Tokens(tuple(tokens), finish))
            tokens = []
        joined.append(event)
    if tokens:
        joined.append(Tokens(tuple(tokens), finish))
    return joined


def decode_report(node: str, admitted: Admitted, *, computed_tokens: int, checkpoints: tuple[int, ...]) -> DecodeReport:
    """A state that was received makes this node's own checkpoint no hit: its `state_hit_tokens` are 0."""
    computed_here = "resumed" if admitted.reused_tokens else "computed"
    return DecodeReport(
        node=node,
        attention_hit_tokens=admitted.hit.attention_tokens,
        state_hit_tokens=0 if admitted.state_arrives else admitted.hit.state_tokens,
        state="received" if admitted.state_arrives else computed_here,
        computed_tokens=computed_tokens,
        checkpoints=checkpoints,
    )
