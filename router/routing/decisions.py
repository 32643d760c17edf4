"""Routing decisions with their reasons and outcomes, kept for whoever asks why a request went where it went. Pure."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from heapq import nlargest
from typing import Any

from router.routing.candidates import Candidate
from router.routing.plan import Plan, RoutedRequest

KEPT_REQUESTS = 1000
KEPT_CANDIDATES = 16


@dataclass
class Outcome:
    """A decision's measured counterpart of `Prediction`; None: not known, yet or for good."""

    first_token_s: float | None = None
    token_gap_s: float | None = None
    computed_tokens: int | None = None


class Decision:
    """One choice of a policy among candidates.

    cause     of the question: "request", "retry" after a failed attempt, "renewal" of a prefill for a reservation,
              "sibling" or "orphan", whose nodes were given
    """

    def __init__(self, request: RoutedRequest, cause: str, plan: Plan, candidates: Sequence[Candidate]) -> None:
        self.request = request
        self.cause = cause
        self.plan = plan
        self.outcome = Outcome()
        self._num_candidates = len(candidates)
        self._candidates = _notable(plan, candidates)

    @property
    def plan_kind(self) -> str:
        """The plan's kind: a label of metrics."""
        plan = self.plan
        if plan.decode is None:
            return "first_token"
        if plan.decode == plan.prefill:
            return "alone"
        return "hand_over" if plan.fetch_from is None else "fetch_and_hand_over"

    def compared(self) -> Iterator[tuple[str, float]]:
        """Measured values divided by predicted ones, by name, as far as both are known."""
        measured = asdict(self.outcome)
        for name, predicted in asdict(self.plan.prediction).items():
            if predicted and measured[name] is not None:
                yield name.removesuffix("_s"), measured[name] / predicted

    def summary(self) -> dict[str, Any]:
        """The `routing` object of a request's report."""
        plan = self.plan
        return {
            "plan": {"prefill": plan.prefill, "decode": plan.decode, "fetch_from": plan.fetch_from},
            "kind": self.plan_kind,
            "reason": plan.reason,
            "cause": self.cause,
            "predicted": _rounded(asdict(plan.prediction)),
            "measured": _rounded(asdict(self.outcome)),
        }

    def json(self) -> dict[str, Any]:
        """The whole decision: `summary`, and what the policy saw."""
        request = asdict(self.request)
        return {
            **self.summary(),
            "request": _rounded(request | {"objectives": _rounded(request["objectives"])}),
            "num_candidates": self._num_candidates,
            "candidates": [_candidate(each, self.plan) for each in self._candidates],
        }


class DecisionLog:
    """Decisions of the last requests, by request id."""

    def __init__(self, kept_requests: int = KEPT_REQUESTS) -> None:
        self._kept_requests = kept_requests
        self._by_request: OrderedDict[str, list[Decision]] = OrderedDict()

    def add(self, request_id: str, decision: Decision) -> None:
        """Keeps a decision, and drops the oldest request's if there are too many."""
        self._by_request.setdefault(request_id, []).append(decision)
        self._by_request.move_to_end(request_id)
        while len(self._by_request) > self._kept_requests:
            self._by_request.popitem(last=False)

    def of(self, request_id: str) -> dict[str, list[Decision]]:
        """The decisions about a request, or about all choices of a client's request, whose ids end in its number.

        `request_id` is that of a choice, of an answer (chatcmpl-1), or of its HTTP request (1).
        """
        if (decisions := self._by_request.get(request_id)) is not None:
            return {request_id: decisions}
        choice = re.compile(rf"(?:[a-z]+[-_])?{re.escape(request_id)}-\d+")
        return {name: decisions for name, decisions in self._by_request.items() if choice.fullmatch(name)}


def _notable(plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates that explain a choice: the chosen ones, and those that hold the most or have the least to do."""
    if len(candidates) <= KEPT_CANDIDATES:
        return candidates
    chosen = (plan.prefill, plan.decode, plan.fetch_from)
    half = KEPT_CANDIDATES // 2
    names = {each.name for each in nlargest(half, candidates, key=lambda each: each.hit.attention_tokens)}
    names |= {each.name for each in nlargest(half - len(chosen), candidates, key=lambda each: -_work(each))}
    return [each for each in candidates if each.name in names or each.name in chosen]


def _work(candidate: Candidate) -> int:
    return candidate.load.waiting_tokens + candidate.load.context_tokens


def _candidate(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    parts = {"prefill": plan.prefill, "decode": plan.decode, "fetch_from": plan.fetch_from}
    load = candidate.load._asdict()
    del load["waiting_lengths"], load["recent_lengths"]
    return {
        "name": candidate.name,
        "role": candidate.role.value,
        "chosen_for": [part for part, name in parts.items() if name == candidate.name],
        "may_prefill": candidate.may_prefill,
        "may_decode": candidate.may_decode,
        "hit": asdict(candidate.hit),
        "load": load,
        "costs": asdict(candidate.costs),
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
