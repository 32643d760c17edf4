"""One request on a decode node: events in, instructions out. `decode_node/driver.py` obeys.

    Admitting -> Receiving -> Running -> Done    a prefill node computes the prompt and sends blocks and state
    Admitting -> Running -> Done                 this node computes the prompt
    Admitting -> Fetching -> Running             and fetches what another node holds of it
    Fetching -> Readmitting -> Running           the fetch failed: the whole prompt is computed
    Receiving -> Interrupted -> Receiving        the transfer failed, and the router asked for another session
    Receiving -> Renewing -> Receiving           the router asked for another session before this one had failed
    Running -> Orphaned -> Running               the router was lost, and another one continues the request
    Running -> Standing -> HandingOver -> Done   another decode node receives blocks and state, and goes on

From any of them to Released when the router's call ends, with or without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

from decode_node.events import (
    Adopted,
    CancelSending,
    CancelSession,
    CountAdmission,
    DecodeInput,
    DecodeInstruction,
    DecodeState,
    FinishAnswer,
    HaltAnswer,
    HandingOver,
    Interrupted,
    OpenSession,
    Orphaned,
    Receiving,
    Renewing,
    ReplyDecoded,
    ResumeAnswer,
    RouterLost,
    RunDecode,
    Running,
    SendRequest,
    SessionLanded,
    Standing,
    StateSent,
)
from headrace.engine.sequence import (
    AdmissionTimedOut,
    Admitted,
    Computed,
    Event,
    Failed,
    Finished,
    Halted,
    Sampled,
    Scored,
    Started,
)
from headrace.request import FinishReason, Token
from headrace.wire.messages import (
    DecodeReport,
    GoOn,
    Halt,
    HaltReply,
    HandedOver,
    HandOver,
    LocalPrefill,
    Renew,
    SessionFailed,
    Stop,
    Tokens,
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


class DecodeLifecycle(Lifecycle[DecodeState]):
    """One request from its admission to its release.

    new_nonce      names each session
    computes_here  nobody sends the prompt to this node: a state that arrives is fetched
    """

    def __init__(self, new_nonce: Callable[[], int], *, computes_here: bool = False) -> None:
        super().__init__(Admitting())
        self._new_nonce = new_nonce
        self._computes_here = computes_here

    def on(self, event: DecodeInput) -> list[DecodeInstruction]:
        """Returns what to do about the event. Raises IllegalTransition."""
        if isinstance(self.state, Released):
            raise self._illegal(event)
        match event:
            case Tokens():  # first: the most frequent event
                self._expect(event, Running)
                return [Reply(event)]
            case Admitted():
                return self._admitted(event)
            case AdmissionTimedOut(message):
                self._expect(event, Admitting, Readmitting)
                return [Refuse(message)]
            case FetchLanded(num_tokens):
                self.state = Running(self._expect(event, Fetching).admitted)
                return [ResumePrefill(num_tokens), Reply(LocalPrefill(num_tokens))]
            case FetchGivenUp():
                self._expect(event, Fetching)
                self.state = Readmitting()
                return [PrefillLocally()]
            case Started() | Computed():  # the progress of a prefill on this node
                self._expect(event, Running)
                return []
            case Scored(logprobs):
                self._expect(event, Running)
                return [Reply(logprobs)]
            case Finished():
                return self._finished(event)
            case Halted(computed):
                return self._halted(computed, self._expect(event, Running))
            case StateSent():
                self._expect(event, HandingOver)
                self.state = Done()
                return [Reply(HandedOver())]
            case SessionLanded():
                return self._session_landed(event)
            case SessionFailed():
                return self._session_failed(event)
            case Renew():
                return self._renew(event.failed_nonce)
            case Stop():
                # In any state: the engine may run the request already while its Admitted is on the way here. But what
                # is handed over ends on the other node.
                return [] if self.is_over or isinstance(self.state, HandingOver) else [FinishAnswer()]
            case Halt() | HandOver() | GoOn():
                return self._move(event)
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
        is_first = isinstance(self._expect(admitted, Admitting, Readmitting), Admitting)
        counted: list[DecodeInstruction] = [CountAdmission(admitted)] if is_first else []
        if not admitted.state_arrives:
            self.state = Running(admitted)
            return [*counted, Reply(LocalPrefill(admitted.reused_tokens))]
        if self._computes_here:
            self.state = Fetching(admitted)
            return [*counted, StartFetch(admitted)]
        return [*counted, *self._open_session(admitted)]

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

    def _move(self, command: Halt | HandOver | GoOn) -> list[DecodeInstruction]:
        """Ignores what has crossed with the answer's end."""
        match command, self.state:
            case Halt(), Running():
                return [HaltAnswer()]
            case Halt(), Admitting() | Fetching() | Readmitting() | Receiving() | Interrupted() | Renewing():
                return [Reply(HaltReply(False))]
            case GoOn(), Standing(admitted):
                self.state = Running(admitted)
                return [ResumeAnswer()]
            case HandOver(reservation), Standing(_, computed):
                self.state = HandingOver()
                return [SendRequest(reservation, computed)]
        return []

    def _finished(self, event: Finished) -> list[DecodeInstruction]:
        if isinstance(self.state, HandingOver):
            return []  # a stop came before the order to hand it over, which counts: it ends on the other node
        before = self.state if isinstance(self.state, Standing) else self._expect(event, Running)
        self.state = Done()
        return [ReplyDecoded(event.reason, before.admitted)]

    def _halted(self, computed: Computed | None, before: Running) -> list[DecodeInstruction]:
        if computed is not None:
            self.state = Standing(before.admitted, computed)
        return [Reply(HaltReply(computed is not None))]

    def _router_lost(self) -> list[DecodeInstruction]:
        if not isinstance(self.state, Running):
            return self._call_ended()
        self.state = Orphaned(self.state.admitted)
        return []

    def _call_ended(self) -> list[DecodeInstruction]:
        before, self.state = self.state, Released()
        match before:
            case Receiving() | Renewing():
                return [CancelSession(), Release()]
            case Fetching():
                return [CancelFetch(), Release()]
            case HandingOver():
                return [CancelSending(), Release()]
        return [Release()]


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


def decode_report(
    node: str,
    admitted: Admitted,
    *,
    computed_tokens: int,
    checkpoints: tuple[int, ...],
    resumed_tokens: int | None = None,
    drafts: tuple[int, int] = (0, 0),
) -> DecodeReport:
    """A state that was received makes this node's own checkpoint no hit: its `state_hit_tokens` are 0.

    resumed_tokens   this node fetched the prompt up to there, and computed the rest; None: it fetched nothing
    drafts           tokens drafted, and accepted
    """
    drafted_tokens, accepted_tokens = drafts
    if resumed_tokens is not None:
        return DecodeReport(
            node=node,
            attention_hit_tokens=admitted.hit.attention_tokens,
            state_hit_tokens=admitted.hit.state_tokens,
            state="resumed",
            computed_tokens=computed_tokens,
            checkpoints=checkpoints,
            fetched_tokens=resumed_tokens - admitted.hit.resumable_tokens,
            drafted_tokens=drafted_tokens,
            accepted_tokens=accepted_tokens,
        )
    computed_here = "resumed" if admitted.reused_tokens else "computed"
    return DecodeReport(
        node=node,
        attention_hit_tokens=admitted.hit.attention_tokens,
        state_hit_tokens=0 if admitted.state_arrives else admitted.hit.state_tokens,
        state="received" if admitted.state_arrives else computed_here,
        computed_tokens=computed_tokens,
        checkpoints=checkpoints,
        drafted_tokens=drafted_tokens,
        accepted_tokens=accepted_tokens,
    )
