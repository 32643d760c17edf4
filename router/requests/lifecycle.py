"""The life of one request as pure logic: what nodes say comes in, instructions go out.

Nothing here opens a call or reads a clock: `RequestLife.on(event, now_s)` is tested by literals, and
`router/requests/driver.py` does what it says.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.request import FinishReason, Request, Token
from headrace.wire import messages as m
from headrace.wire.errors import NodeBusy, NodeError, RequestRefused
from router.errors import ApiError, IllegalEvent, from_node
from router.requests.events import (
    DecodeLost,
    DecodeStarted,
    Event,
    FailRequest,
    FinishRequest,
    GaveUp,
    Instruction,
    PrefillFailed,
    PrefillStarted,
    RequestPhase,
    SendRenew,
    SendStop,
    Show,
    ShowPrompt,
    StartOver,
    StartPrefill,
    StopFound,
)
from router.requests.report import RequestReport

_NEXT: dict[RequestPhase, frozenset[RequestPhase]] = {
    RequestPhase.QUEUED: frozenset({RequestPhase.RESERVED, RequestPhase.PREFILLING}),
    RequestPhase.RESERVED: frozenset(
        {RequestPhase.PREFILLING, RequestPhase.MOVING, RequestPhase.MIGRATING, RequestPhase.DONE}
    ),
    RequestPhase.PREFILLING: frozenset(
        {RequestPhase.RESERVED, RequestPhase.MOVING, RequestPhase.DECODING, RequestPhase.MIGRATING, RequestPhase.DONE}
    ),
    RequestPhase.MOVING: frozenset(
        {RequestPhase.RESERVED, RequestPhase.DECODING, RequestPhase.MIGRATING, RequestPhase.DONE}
    ),
    RequestPhase.DECODING: frozenset({RequestPhase.MIGRATING, RequestPhase.DONE}),
    RequestPhase.MIGRATING: frozenset({RequestPhase.RESERVED, RequestPhase.PREFILLING, RequestPhase.DONE}),
    RequestPhase.DONE: frozenset(),
    RequestPhase.FAILED: frozenset(),
}


class RequestLife:
    """Phase, tokens so far and report of one request.

    An *attempt* is one decode call, or one prefill call when no decode node is involved. What an attempt
    that was given up says late must not be passed on to `on`: leaving its calls sees to that.
    """

    def __init__(self, request: Request, *, max_attempts: int, now_s: float) -> None:
        self.request = request
        self.phase = RequestPhase.QUEUED
        self.entered_s: dict[RequestPhase, float] = {RequestPhase.QUEUED: now_s}
        self.report = RequestReport()
        self.generated: list[int] = []
        self.finish: FinishReason | None = None
        self.failure: ApiError | None = None
        self.stopped = False
        self._prompt_shown = False
        self._prefill_failures = 0
        self._decode_failures = 0
        self._max_attempts = max_attempts
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._nonce: int | None = None
        self._first: int | None = None
        self._moving = False
        self._landed = False
        self._early: list[Token] = []
        self._early_finish: FinishReason | None = None
        self._told_finish: FinishReason | None = None
        self._alone_finish = FinishReason.LENGTH

    @property
    def needs_decode(self) -> bool:
        """Whether more than the token that a prefill samples is wanted."""
        return self.request.sampling.max_tokens > 1

    @property
    def is_over(self) -> bool:
        return self.phase in (RequestPhase.DONE, RequestPhase.FAILED)

    @property
    def request_so_far(self) -> Request:
        """What a node needs to go on: the tokens shown so far follow the prompt."""
        sampling = self.request.sampling
        if self._prompt_shown:
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(self.request, tokens=(*self.request.tokens, *self.generated), sampling=sampling)

    def on(self, event: Event, now_s: float) -> list[Instruction]:
        """What to do about an event; raises IllegalEvent when it cannot happen in this phase."""
        if self.is_over:
            if not isinstance(event, m.PrefillDone):
                raise IllegalEvent(f"{type(event).__name__} for a request that is {self.phase.value}")
            self.report.prefill_done(event.report)
            return []
        match event:
            case m.Tokens(tokens, finish):  # first: it comes most often
                self._told_finish = finish
                return self._on_tokens(tokens, now_s)
            case DecodeStarted(node):
                self.report.decode_node = node
                return []
            case PrefillStarted(node, nonce):
                self._nonce = nonce
                self.report.prefill_started(node)
                self._enter(RequestPhase.PREFILLING if self._first is None else RequestPhase.MOVING, now_s)
                return []
            case m.Reservation():
                self._enter(RequestPhase.RESERVED, now_s)
                self._nonce, self._moving = event.nonce, True
                self.report.reserved(event)
                return [StartPrefill(event, self._first)]
            case m.LocalPrefill(resumed_tokens):
                self._enter(RequestPhase.PREFILLING, now_s)
                self.report.local_prefill(resumed_tokens)
                return []
            case m.PromptLogprobs():
                shown, self._prompt_shown = self._prompt_shown, True
                return [] if shown else [ShowPrompt(event)]
            case m.FirstToken(token, finish):
                return self._on_first_token(token, finish, now_s)
            case m.PrefillDone(report):
                self.report.prefill_done(report)
                return [] if self._moving else self._finish(self._alone_finish, now_s)
            case m.TransferReport():
                self._require("TransferReport", RequestPhase.PREFILLING, RequestPhase.MOVING)
                self._landed = True
                self.report.transfer = event
                if self._first is None:
                    # Without its prefill node nobody can tell the first token any more.
                    return self._start_over(now_s) if self._nonce is None else []
                return self._decode(now_s)
            case m.DecodeDone(finish, decode_report):
                self.report.decode_done(decode_report)
                if self._moving and self._first is None:
                    self._early_finish = finish
                    return []
                return self._finish(FinishReason.STOP if self.stopped else finish, now_s)
            case StopFound():
                return self._on_stop_found(now_s)
            case PrefillFailed() | m.SessionFailed() | DecodeLost():
                return self._on_failure(event, now_s)
            case GaveUp(cause):
                return self._fail(cause, now_s)
        raise TypeError(f"unknown event {event!r}")

    def _on_tokens(self, tokens: tuple[Token, ...], now_s: float) -> list[Instruction]:
        if self.stopped:
            return []
        if self._moving and self._first is None:
            # The decode node was quicker than the first token's way from the prefill node.
            self._early.extend(tokens)
            return []
        if self.phase is not RequestPhase.DECODING:
            self._enter(RequestPhase.DECODING, now_s)
        return [self._show(tokens)]

    def _on_first_token(self, token: Token, finish: FinishReason | None, now_s: float) -> list[Instruction]:
        self._require("FirstToken", RequestPhase.PREFILLING, RequestPhase.MOVING, RequestPhase.DECODING)
        if self._first is not None:
            return []  # a repeated prefill samples what the client has already seen
        if self.request.sampling.max_tokens == 0:
            return []  # the prompt's own logprobs are wanted, nothing more
        self._first = token.id
        if not self._moving:
            self._alone_finish = finish or FinishReason.LENGTH
            return [self._show((token,))]
        if finish is not None:
            return [self._show((token,)), *self._finish(finish, now_s)]
        self._enter(RequestPhase.MOVING, now_s)
        early = self._decode(now_s) if self._landed else []
        return [self._show((token,)), *early]

    def _decode(self, now_s: float) -> list[Instruction]:
        self._enter(RequestPhase.DECODING, now_s)
        early, self._early = tuple(self._early), []
        ended = [] if self._early_finish is None else self._finish(self._early_finish, now_s)
        return [*([self._show(early)] if early else []), *ended]

    def _on_stop_found(self, now_s: float) -> list[Instruction]:
        self.stopped = True
        if self.phase is RequestPhase.DECODING:
            return [SendStop()]  # it publishes what it decoded, and reports
        return self._finish(FinishReason.STOP, now_s)

    def _on_failure(self, event: PrefillFailed | m.SessionFailed | DecodeLost, now_s: float) -> list[Instruction]:
        if isinstance(event, DecodeLost):
            return self._on_decode_lost(event.cause, now_s)
        if event.nonce != self._nonce or self.phase is RequestPhase.DECODING:
            return []  # already repaired, or landed before
        if isinstance(event, m.SessionFailed):
            cause: NodeError | None = NodeError(self.report.decode_node or "decode node", event.cause)
        else:
            cause = event.cause
        if isinstance(cause, RequestRefused):
            return self._fail(from_node(cause), now_s)
        if event.nonce is None and self._first is not None:
            return self._finish(self._alone_finish, now_s)  # only the report is lost
        if cause is not None and not isinstance(cause, NodeBusy):
            self._prefill_failures += 1
            if self._prefill_failures >= self._max_attempts:
                return self._fail(from_node(cause), now_s)
        if cause is None or event.nonce is None or self._landed:
            # Nobody can prefill for this reservation, or it landed but its first token is lost.
            return self._start_over(now_s)
        self._nonce = None
        return [SendRenew(event.nonce)]

    def _on_decode_lost(self, cause: NodeError, now_s: float) -> list[Instruction]:
        if isinstance(cause, RequestRefused):
            return self._fail(from_node(cause), now_s)
        if self.stopped:
            return self._finish(FinishReason.STOP, now_s)
        if self._told_finish is not None and not self._early:
            return self._finish(self._told_finish, now_s)  # every token was shown, only the report is lost
        if not isinstance(cause, NodeBusy):
            self._decode_failures += 1
            if self._decode_failures >= self._max_attempts:
                return self._fail(from_node(cause), now_s)
            if self.phase not in (RequestPhase.QUEUED, RequestPhase.MIGRATING):
                self.report.migrations += 1
        return self._start_over(now_s)

    def _start_over(self, now_s: float) -> list[Instruction]:
        if self.phase not in (RequestPhase.QUEUED, RequestPhase.MIGRATING):
            self._enter(RequestPhase.MIGRATING, now_s)
        self._begin_attempt()
        return [StartOver()]

    def _show(self, tokens: tuple[Token, ...]) -> Show:
        self.generated.extend(token.id for token in tokens)
        return Show(tokens)

    def _finish(self, reason: FinishReason, now_s: float) -> list[Instruction]:
        self._enter(RequestPhase.DONE, now_s)
        self.finish = reason
        return [FinishRequest(reason)]

    def _fail(self, cause: ApiError, now_s: float) -> list[Instruction]:
        self.phase = RequestPhase.FAILED
        self.entered_s[RequestPhase.FAILED] = now_s
        self.failure = cause
        return [FailRequest(cause)]

    def _require(self, event: str, *phases: RequestPhase) -> None:
        if self.phase not in phases:
            raise IllegalEvent(f"{event} for a request that is {self.phase.value}")

    def _enter(self, phase: RequestPhase, now_s: float) -> None:
        if phase is self.phase:
            return
        if phase not in _NEXT[self.phase]:
            raise IllegalEvent(f"a request that is {self.phase.value} cannot become {phase.value}")
        self.phase = phase
        self.entered_s.setdefault(phase, now_s)
