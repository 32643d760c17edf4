"""One request in the router: events in, instructions out.

Nothing here opens a call or reads a clock: `RequestLifecycle.on(event, now_s)` is tested by literals and explored in
every order of events, and `router/requests/driver.py` obeys. What other processes may do at any time is repaired or
ends the request; an event that the protocol does not allow in the present state raises IllegalEvent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, assert_never

from headrace.request import FinishReason, PromptLogprobs, Request
from headrace.wire import messages as m
from headrace.wire.errors import NodeBusy, NodeError, NodeLost, RequestRefused
from headrace.wire.node_messages import Role
from router.errors import ApiError, IllegalEvent, from_node
from router.requests import relocation
from router.requests.events import (
    DecodeLost,
    DecodeStarted,
    Event,
    FailRequest,
    FinishRequest,
    GaveUp,
    Instruction,
    Judged,
    MoveWanted,
    NodeLeaves,
    NoReceiver,
    PrefillFailed,
    PrefillStarted,
    SenderLost,
    SendGoOn,
    SendHandOver,
    SendRenew,
    SendStop,
    Show,
    ShowPrompt,
    StartOver,
    StartPrefill,
    StopFound,
)
from router.requests.failures import Failures
from router.requests.prefill_repair import awaits_prefill, renewal
from router.requests.report import RequestReport
from router.requests.shown_output import ShownOutput
from router.requests.states import (
    AwaitingFirstToken,
    AwaitingRenewal,
    Completed,
    Decoding,
    Failed,
    Migrating,
    Moving,
    Prefilling,
    PrefillingAlone,
    PrefillingLocally,
    Queued,
    Relocating,
    RequestPhase,
    RequestState,
    Reserved,
)

Transition: TypeAlias = tuple[RequestState, list[Instruction]]


class RequestLifecycle:
    """State, tokens so far and report of one request.

    An *attempt* is one decode call with its prefill calls, or one prefill call alone. Events of an attempt that was
    given up must not be passed on to `on`: the driver leaves its calls first.

    token_gap_s   asked for between tokens; None: any
    """

    def __init__(self, request: Request, *, max_attempts: int, now_s: float, token_gap_s: float | None = None) -> None:
        self.request = request
        self.state: RequestState = Queued()
        self.entered_s: dict[RequestPhase, float] = {self.phase: now_s}
        self.report = RequestReport()
        # Within a gap the prefill node's token is not shown alone: the hand-over and the end of a step lie between it
        # and the decode node's first one, more than most gaps allow.
        self.shown = ShownOutput(request, first_may_stand_alone=token_gap_s is None)
        self.failures = Failures()
        self._is_prefilling = False  # the present prefill node computes the prompt
        self._has_decoded = False  # the present decode node has sent a token
        self._max_attempts = max_attempts

    @property
    def phase(self) -> RequestPhase:
        return self.state.phase

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer ended; None unless the request is completed."""
        return self.state.finish if isinstance(self.state, Completed) else None

    @property
    def failure(self) -> ApiError | None:
        return self.state.cause if isinstance(self.state, Failed) else None

    @property
    def is_over(self) -> bool:
        return isinstance(self.state, (Completed, Failed))  # each token asks: a union would be made anew

    @property
    def has_computed_prompt(self) -> bool:
        """True once the prompt's blocks can be found on the nodes that computed and received it."""
        match self.state:
            case Decoding() | Completed() | PrefillingAlone(FinishReason()):
                return True
        return False

    @property
    def needs_decode(self) -> bool:
        """True if more is wanted than the one token that a prefill node samples."""
        return self.request.sampling.max_tokens > 1

    @property
    def generated(self) -> list[int]:
        """Ids of the answer's tokens so far, as the client has been shown them."""
        return self.shown.generated

    def on(self, event: Event, now_s: float) -> list[Instruction]:
        """Enters the next state and returns what to do; raises IllegalEvent."""
        self.state, instructions = self._next(event)
        if self.shown.held_first and not (isinstance(self.state, Moving) or self.state == Decoding()):
            instructions = [self.shown.show(()), *instructions]  # the decode node's first token will not come
        self.entered_s.setdefault(self.phase, now_s)
        return instructions

    def _next(self, event: Event) -> Transition:
        if self.is_over and not isinstance(event, m.PrefillDone):
            raise self._illegal(event)
        match event:
            case m.Tokens():  # first: the most frequent event
                return self._on_tokens(event)
            case DecodeStarted(node):
                self.report.decode_node = node
                self._has_decoded = False
                return self.state, []
            case PrefillStarted():
                return self._on_prefill_started(event)
            case m.Reservation():
                return self._on_reservation(event)
            case m.LocalPrefill():
                return self._on_local_prefill(event)
            case PromptLogprobs():
                return self._on_prompt_logprobs(event)
            case m.ComputeStarted():
                self._is_prefilling = True
                return self.state, []
            case m.FirstToken():
                return self._on_first_token(event)
            case m.PrefillDone():
                return self._on_prefill_done(event)
            case m.TransferReport():
                return self._on_landed(event)
            case m.DecodeDone():
                return self._on_decode_done(event)
            case MoveWanted():
                return relocation.on_move_wanted(self.state)
            case m.HaltReply(is_halted):
                return self._on_halt_reply(event, is_halted)
            case m.HandedOver():
                return self.state, []  # the receiver reports when it has landed
            case NoReceiver():
                return self._stay(self.state) if isinstance(self.state, Relocating) else (self.state, [])
            case SenderLost(cause):
                return self._on_sender_lost(cause)
            case NodeLeaves():
                return self._on_node_leaves()
            case Judged(outlived):
                return self._on_judged(event, outlived)
            case StopFound():
                return self._on_stop_found(event)
            case PrefillFailed(nonce, cause):
                return self._on_prefill_failed(nonce, cause)
            case m.SessionFailed(nonce, reason):
                return self._on_prefill_failed(nonce, NodeError(self.report.decode_node or "decode node", reason))
            case DecodeLost(cause):
                return self._on_decode_lost(cause)
            case GaveUp(cause):
                return self._fail(cause)
            case _:
                assert_never(event)

    # ------------------------------------------------------------ the way to the first token

    def _on_reservation(self, event: m.Reservation) -> Transition:
        match self.state:
            case Queued() | Migrating():
                first_token = None
            case AwaitingRenewal(first_token):
                pass
            case Relocating(_, newest_token):
                return Moving(event.nonce, newest_token, from_decode=True), [SendHandOver(event)]
            case _:
                raise self._illegal(event)
        self.report.reserved(event)
        return Reserved(event.nonce, first_token), [StartPrefill(event, first_token)]

    def _on_local_prefill(self, event: m.LocalPrefill) -> Transition:
        if not isinstance(self.state, Queued | Migrating):
            raise self._illegal(event)
        self.report.local_prefill(event.resumed_tokens)
        return PrefillingLocally(), []

    def _on_prefill_started(self, event: PrefillStarted) -> Transition:
        after: RequestState
        match self.state:
            case Reserved(nonce, first_token) if nonce == event.nonce:
                after = Prefilling(nonce) if first_token is None else Moving(nonce, first_token)
            case Queued() | Migrating() if event.nonce is None:
                after = PrefillingAlone()
            case _:
                raise self._illegal(event)
        self.report.prefill_started(event.node)
        self._is_prefilling = False
        return after, []

    def _on_first_token(self, event: m.FirstToken) -> Transition:
        token, finish = event.token, event.finish
        match self.state:
            case Prefilling() | AwaitingFirstToken() if finish is not None:
                return self._complete(finish, self.shown.show((token,)))
            case Prefilling(nonce):
                return Moving(nonce, token.id), [*self.shown.show_or_hold(token)]
            case AwaitingFirstToken(held=(), is_decoded=False):
                return Decoding(), [*self.shown.show_or_hold(token)]
            case AwaitingFirstToken(_, held, held_finish, is_decoded):
                shown = [self.shown.show((token,))]
                if held:
                    shown.append(self.shown.show(held))
                if is_decoded and held_finish is not None:
                    return self._complete(held_finish, *shown)
                return Decoding(held_finish), [*shown]
            case PrefillingAlone(None) if self.request.sampling.max_tokens > 0:
                return PrefillingAlone(finish or FinishReason.LENGTH), [self.shown.show((token,))]
            case PrefillingAlone() | Moving() | Decoding():
                return self.state, []  # not wanted, or shown before: a repeated prefill samples the same token
            case _:
                raise self._illegal(event)

    def _on_prompt_logprobs(self, event: PromptLogprobs) -> Transition:
        if self.shown.has_gap_before(event):
            raise self._illegal(event)
        new = self.shown.new_scores(event)
        return self.state, [] if new is None else [ShowPrompt(new)]

    def _on_prefill_done(self, event: m.PrefillDone) -> Transition:
        if isinstance(self.state, Queued | Migrating | PrefillingLocally):
            raise self._illegal(event)
        self.report.prefill_done(event.report)
        if isinstance(self.state, PrefillingAlone):
            return self._complete(self.state.finish or FinishReason.LENGTH)
        return self.state, []

    def _on_landed(self, event: m.TransferReport) -> Transition:
        if not relocation.is_relocating(self.state):
            self.report.transfer = event
        match self.state:
            case Prefilling(nonce):
                return AwaitingFirstToken(nonce), []
            case AwaitingRenewal(None):
                return self._start_over()  # only the prefill node that failed knew the first token
            case AwaitingRenewal() | Moving():
                self.report.moves += relocation.is_relocating(self.state)
                return Decoding(), []
            case _:
                raise self._illegal(event)

    # ------------------------------------------------------------ the decode node's tokens

    def _on_tokens(self, event: m.Tokens) -> Transition:
        self._has_decoded = True
        self.failures = self.failures.after_progress()
        match self.state:
            case Decoding(is_stopped=True):
                return self.state, []
            case Decoding(finish, is_halting=is_halting):
                after = self.state if event.finish is finish else Decoding(event.finish, is_halting=is_halting)
                return after, [self.shown.show(event.tokens)]
            case PrefillingLocally():
                return Decoding(event.finish), [self.shown.show(event.tokens)]
            case AwaitingFirstToken(_, held):
                return replace(self.state, held=(*held, *event.tokens), finish=event.finish), []
            case _:
                raise self._illegal(event)

    def _on_decode_done(self, event: m.DecodeDone) -> Transition:
        self.report.decode_done(event.report)
        match self.state:
            case Decoding(is_stopped=True):
                return self._complete(FinishReason.STOP)
            case Decoding() | PrefillingLocally():
                return self._complete(event.finish)
            case AwaitingFirstToken():
                return replace(self.state, finish=event.finish, is_decoded=True), []
            case _:
                raise self._illegal(event)

    def _on_stop_found(self, event: StopFound) -> Transition:
        match self.state:
            case Decoding():  # the node publishes what it decoded, and reports
                return replace(self.state, is_stopped=True), [SendStop()]
            case Queued():
                raise self._illegal(event)
            case _:
                return self._complete(FinishReason.STOP)

    # ------------------------------------------------------------ failures

    def _on_prefill_failed(self, nonce: int | None, cause: NodeError | None) -> Transition:
        """Repairs a prefill that failed, once: both nodes may report the failure. `cause` None: no node is left."""
        if not awaits_prefill(self.state, nonce):
            return self.state, []  # repaired already, or the transfer has landed
        if isinstance(cause, RequestRefused):
            return self._fail(from_node(cause))
        if isinstance(self.state, PrefillingAlone) and self.state.finish is not None:
            return self._complete(self.state.finish)  # the answer is complete, only the report is lost
        if cause is not None and not relocation.is_relocating(self.state):
            was_computing = self._is_prefilling and isinstance(self.state, Prefilling | PrefillingAlone)
            self.failures = self.failures.after_failure(Role.PREFILL, cause, was_computing=was_computing)
            if (end := self.failures.verdict(cause, self._max_attempts)) is not None:
                return self._fail(end)
        if isinstance(cause, NodeBusy):  # it may wait for room that waits for what is reserved: that is given back
            return self._start_over()
        if self.failures.await_judgement or nonce is None or cause is None or (renewing := renewal(self.state)) is None:
            return self._start_over()
        return renewing, [SendRenew(nonce)]

    def _on_decode_lost(self, cause: NodeError) -> Transition:
        if isinstance(self.state, Relocating):
            return self._stay(self.state)  # this was the receiver, and has not reserved
        if isinstance(cause, RequestRefused):
            return self._fail(from_node(cause))
        if (finish := relocation.answer_is_complete(self.state)) is not None:
            return self._complete(finish)  # every token is shown, only the report is lost
        has_landed = isinstance(self.state, PrefillingLocally | AwaitingFirstToken | Decoding)
        was_computing = has_landed and not self._has_decoded
        self.failures = self.failures.after_failure(Role.DECODE, cause, was_computing=was_computing)
        if (end := self.failures.verdict(cause, self._max_attempts)) is not None:
            return self._fail(end)
        if not isinstance(cause, NodeBusy) and not isinstance(self.state, Queued | Migrating):
            self.report.migrations += 1
        return self._start_over()

    def _on_judged(self, event: Judged, outlived: frozenset[str]) -> Transition:
        if not isinstance(self.state, Queued | Migrating) or not self.failures.unproven:
            raise self._illegal(event)
        last = NodeLost(self.failures.unproven[-1], "lost, and not heard of again")
        self.failures = self.failures.after_judgement(outlived)
        end = self.failures.verdict(last, self._max_attempts)
        return (self.state, []) if end is None else self._fail(end)

    # ------------------------------------------------------------ moves

    def _on_halt_reply(self, event: m.HaltReply, is_halted: bool) -> Transition:
        newest_token = self.generated[-1] if self.generated else 0
        answered = relocation.halt_answered(self.state, is_halted, self.report.decode_node, newest_token)
        if answered is None:
            raise self._illegal(event)
        return answered

    def _stay(self, before: Relocating) -> Transition:
        self.report.decode_node, self._has_decoded = before.sender, True
        return Decoding(), [SendGoOn()]

    def _on_sender_lost(self, cause: NodeError) -> Transition:
        match self.state:
            case Relocating():
                self.report.migrations += 1
                return self._start_over()
            case Moving(nonce, from_decode=True):  # whatever it answers, a prefill node may serve the reservation
                return self._on_prefill_failed(nonce, NodeError(cause.node, cause.message))
        return self.state, []  # it has landed, or is repaired already

    def _on_node_leaves(self) -> Transition:
        if (finish := relocation.answer_is_complete(self.state)) is not None:
            return self._complete(finish)
        self.report.migrations += not isinstance(self.state, Queued | Migrating)
        return self._start_over()

    # ------------------------------------------------------------ endings

    def _start_over(self) -> Transition:
        return Queued() if isinstance(self.state, Queued) else Migrating(), [StartOver()]

    def _complete(self, finish: FinishReason, *shown: Show) -> Transition:
        return Completed(finish), [*shown, FinishRequest(finish)]

    def _fail(self, cause: ApiError) -> Transition:
        return Failed(cause), [FailRequest(cause)]

    def _illegal(self, event: Event) -> IllegalEvent:
        return IllegalEvent(f"{type(event).__name__} for a request that is {self.phase.value}")
