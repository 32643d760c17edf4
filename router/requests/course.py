"""The course of one request's routing decisions: told to the ledger, and compared with what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.cache.types import PrefixKey
from headrace.request import Request
from headrace.wire import messages as m
from router.metrics import RouterMetrics
from router.requests.events import Event
from router.routing.candidates import Candidate
from router.routing.decisions import Decision, DecisionLog
from router.routing.ledger import Ledger


class Course:
    """One decision at a time: the next one takes the place of the last.

    decision   the latest; None before the first
    """

    def __init__(self, ledger: Ledger, log: DecisionLog, metrics: RouterMetrics) -> None:
        self.decision: Decision | None = None
        self._is_open = False
        self._ledger = ledger
        self._log = log
        self._metrics = metrics
        self._decided_s = 0.0
        self._is_computed = False
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_tokens = 0

    def decided(
        self,
        request: Request,
        decision: Decision,
        candidates: Sequence[Candidate],
        keys: Mapping[int, Sequence[PrefixKey]],
        now_s: float,
    ) -> None:
        """The request goes where the decision says. Called at once, so that the next decision counts it."""
        self.end(now_s)
        self.decision, self._decided_s, self._is_open = decision, now_s, True
        self._is_computed, self._first_s, self._num_tokens = False, None, 0
        self._ledger.sent(decision.request, decision.plan, candidates, keys, request.boundaries)
        self._log.add(request.request_id, decision)
        self._metrics.decided(decision)

    def on(self, event: Event, now_s: float) -> None:
        """An event of the attempt that the decision began."""
        if self.decision is None or not self._is_open:
            return
        ledger, number = self._ledger, self.decision.request.number
        match event:
            case m.Tokens() | m.FirstToken():  # first: the most frequent event
                if not self._is_computed:
                    self._is_computed = True
                    ledger.prompt_computed(number, now_s)
            case m.Reservation():
                ledger.reserved(number)
            case m.LocalPrefill(resumed_tokens):
                ledger.prefills_itself(number, resumed_tokens, now_s)
                self.decision.outcome.computed_tokens = self.decision.request.num_tokens - resumed_tokens
            case m.ComputeStarted():
                ledger.started(number, now_s)
            case m.PrefillDone(report):
                self.decision.outcome.computed_tokens = report.computed_tokens

    def shown(self, count: int, now_s: float) -> None:
        """The client gets so many tokens: predictions are about what it sees."""
        if self.decision is None or not self._is_open:
            return
        self._num_tokens += count
        self._last_s = now_s
        if self._first_s is None:
            self._first_s = now_s
            self.decision.outcome.first_token_s = now_s - self._decided_s

    def end(self, now_s: float) -> None:
        """The attempt is over; more than once does no harm."""
        decision = self.decision
        if decision is None or not self._is_open:
            return
        self._is_open = False
        self._ledger.ended(decision.request.number, now_s)
        if self._first_s is not None and self._num_tokens > 1:
            decision.outcome.token_gap_s = (self._last_s - self._first_s) / (self._num_tokens - 1)
        for name, ratio in decision.compared():
            self._metrics.predicted(name, ratio)
