"""One request on a prefill node: events in, instructions out. `prefill_node/role.py` obeys.

    Admitting -> Ready -> Computing -> Sending -> Done   the decode node receives blocks and state
    Admitting -> Ready -> Computing -> Done              nothing to send: no reservation, or the answer has ended
    Admitting -> Fetching -> Ready                       another node holds more of the prompt
    Admitting -> Fetching -> Readmitting -> Ready        the fetch failed: the prompt is computed instead

A transfer opens with the first chunk: its clock must not run while the prompt waits for others.

From any of them to Released when the router's call ends, with or without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from headrace.engine.sequence import AdmissionTimedOut, Admitted, Computed, Failed, Finished, Sampled, Scored, Started
from headrace.request import PromptLogprobs
from headrace.wire.messages import ComputeStarted, FirstToken, PrefillReport
from node_runtime.fetch_policy import FetchPolicy
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
    Lifecycle,
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
class Ready:
    """The request has blocks and a slot, `present` of them filled; its first chunk waits for other prompts' chunks."""

    admitted: Admitted
    present: Computed


@dataclass(frozen=True)
class Computing:
    """The engine computes the prompt from `resumed_tokens` on, and samples the first token."""

    admitted: Admitted
    resumed_tokens: int


@dataclass(frozen=True)
class Sending:
    """The router has the first token; blocks and state are still on their way to the decode node."""

    admitted: Admitted
    resumed_tokens: int


PrefillState: TypeAlias = Admitting | Fetching | Readmitting | Ready | Computing | Sending | Done | Released

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class TransferSent:
    """The network has taken over everything that goes to the decode node."""


PrefillInput: TypeAlias = (
    Admitted | AdmissionTimedOut | Started | Computed | Scored | Sampled | Finished | Failed  # from the engine
    | FetchLanded | FetchGivenUp  # from the fetch
    | TransferSent | CallBroken  # from the transfer to the decode node
    | CallEnded  # from the router
)  # fmt: skip

# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class CountDeclinedFetch:
    """Record that a fetch was possible and estimated not to pay."""


@dataclass(frozen=True)
class OpenTransfer:
    """Open the session in which blocks and state go to the decode node."""


@dataclass(frozen=True)
class SendComputed:
    """Let the transfer send these tokens' blocks once the device has computed them."""

    computed: Computed


@dataclass(frozen=True)
class SendState:
    """Let the transfer send the state, and with it the token after which the decode node continues."""

    first_token: int


@dataclass(frozen=True)
class CancelTransfer:
    """Cancel the transfer to the decode node, unless it is complete."""


@dataclass(frozen=True)
class ReplyPrefilled:
    """Send PrefillDone, the last message, to the router; see `prefill_report`."""

    admitted: Admitted
    resumed_tokens: int


PrefillReply: TypeAlias = ComputeStarted | FirstToken | PromptLogprobs
PrefillInstruction: TypeAlias = (
    StartFetch | CancelFetch | CountDeclinedFetch | ResumePrefill | PrefillLocally
    | OpenTransfer | SendComputed | SendState | CancelTransfer
    | Reply[PrefillReply] | ReplyPrefilled | Refuse | Fail | Release
)  # fmt: skip


class PrefillLifecycle(Lifecycle[PrefillState]):
    """One request from its admission to its release.

    policy       decides about a fetch
    is_sent      a reservation came with the request: blocks and state go to a decode node
    first_token  what the client has seen already, from a prefill node that failed; None: nothing
    """

    def __init__(self, policy: FetchPolicy, *, is_sent: bool, first_token: int | None) -> None:
        super().__init__(Admitting())
        self._policy = policy
        self._is_sent = is_sent
        self._first_token = first_token

    def on(self, event: PrefillInput) -> list[PrefillInstruction]:
        """Returns what to do about the event. Raises IllegalTransition."""
        if isinstance(self.state, Released):
            raise self._illegal(event)
        match event:
            case Admitted():
                return self._admitted(event)
            case AdmissionTimedOut(message):
                self._expect(event, Admitting, Readmitting)
                return [Refuse(message)]
            case FetchLanded(num_tokens):
                admitted = self._expect(event, Fetching).admitted
                self.state = Ready(admitted, Computed(num_tokens, admitted.device_event))
                return [ResumePrefill(num_tokens)]
            case FetchGivenUp():
                self._expect(event, Fetching)
                self.state = Readmitting()
                return [PrefillLocally()]
            case Started():
                return self._started(self._expect(event, Ready))
            case Computed():
                self._expect(event, Computing)
                return self._send(event)
            case Scored(logprobs):
                self._expect(event, Computing)
                return [Reply(logprobs)]
            case Sampled():
                return self._sampled(event, self._expect(event, Computing))
            case Finished():
                return self._finished(event)
            case TransferSent():
                state = self._expect(event, Sending)
                return self._done(state.admitted, state.resumed_tokens)
            case CallBroken(error) | Failed(error):
                return [] if self.is_over else [Fail(error)]
            case CallEnded():
                return self._call_ended()
            case _:
                assert_never(event)

    def _admitted(self, admitted: Admitted) -> list[PrefillInstruction]:
        if admitted.state_arrives:
            self._expect(admitted, Admitting)
            self.state = Fetching(admitted)
            return [StartFetch(admitted)]
        before = self._expect(admitted, Admitting, Readmitting)
        is_declined = isinstance(before, Admitting) and self._policy.candidate(admitted.hit) is not None
        self.state = Ready(admitted, Computed(admitted.reused_tokens, admitted.device_event))
        return [CountDeclinedFetch()] if is_declined else []

    def _started(self, before: Ready) -> list[PrefillInstruction]:
        """The engine computes from here on; what precedes is in the blocks and can be sent."""
        present = before.present
        self.state = Computing(before.admitted, present.num_tokens)
        opened: list[PrefillInstruction] = [OpenTransfer()] if self._is_sent else []
        return [*opened, Reply(ComputeStarted()), *(self._send(present) if present.num_tokens else [])]

    def _send(self, computed: Computed) -> list[PrefillInstruction]:
        return [SendComputed(computed)] if self._is_sent else []

    def _sampled(self, event: Sampled, before: Computing) -> list[PrefillInstruction]:
        reply = Reply(FirstToken(event.token, event.finish))
        # After a retry the decode node continues after the token that the client has seen, whatever is sampled now.
        if not self._is_sent or (event.finish is not None and self._first_token is None):
            return [reply, *self._done(before.admitted, before.resumed_tokens)]
        self.state = Sending(before.admitted, before.resumed_tokens)
        first_token = event.token.id if self._first_token is None else self._first_token
        return [SendState(first_token), reply]

    def _finished(self, event: Finished) -> list[PrefillInstruction]:
        if isinstance(self.state, Sending):
            return []  # the first token was the last one, too
        state = self._expect(event, Computing)
        return self._done(state.admitted, state.resumed_tokens)

    def _done(self, admitted: Admitted, resumed_tokens: int) -> list[PrefillInstruction]:
        self.state = Done()
        return [ReplyPrefilled(admitted, resumed_tokens)]

    def _call_ended(self) -> list[PrefillInstruction]:
        is_fetching = isinstance(self.state, Fetching)
        self.state = Released()
        return [
            *([CancelFetch()] if is_fetching else []),
            *([CancelTransfer()] if self._is_sent else []),
            Release(),
        ]


def prefill_report(
    node: str, admitted: Admitted, resumed_tokens: int, *, computed_tokens: int, checkpoints: tuple[int, ...]
) -> PrefillReport:
    """Tokens between this node's own checkpoint and `resumed_tokens` were fetched."""
    return PrefillReport(
        node=node,
        attention_hit_tokens=admitted.hit.attention_tokens,
        state_hit_tokens=admitted.hit.state_tokens,
        resumed_tokens=resumed_tokens,
        computed_tokens=computed_tokens,
        checkpoints=checkpoints,
        fetched_tokens=resumed_tokens - admitted.hit.resumable_tokens,
    )
