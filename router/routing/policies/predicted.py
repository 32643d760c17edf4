"""The policy `predicted`: the plan that adds least to the time of all requests, within the objectives. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from router.routing.candidates import Candidate
from router.routing.plan import Plan, Prediction, RoutedRequest
from router.routing.policies.cost import (
    AnswerPart,
    PromptPart,
    answer_part,
    fetched_prompt_part,
    hand_over_s,
    prompt_part,
)

FEW = 24
"""So many candidates are all priced; of more, only those that stand out by their hits or by their load."""
STANDING_OUT = 6
"""Candidates that are kept of many, by each measure."""
PAIRED = 3
"""Nodes, by the price of the prompt and by that of the answer, whose pairs are compared."""
HOLDERS = 2
"""Nodes that may be fetched from: those with the deepest checkpoints."""


class Predicted:
    """Compares plans by their predicted seconds: the request's own, and what it adds to those of the others.

    A plan within the objectives goes before any that misses one; among those that miss, the one that misses least.
    """

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan | None:
        turn = request.number % max(len(candidates), 1)
        nodes = shortlist([*candidates[turn:], *candidates[:turn]])  # the first of equals wins: they take turns
        plans = _plans(request, nodes)
        best = min(plans, key=lambda priced: (priced.missed, priced.seconds), default=None)
        return None if best is None else best.plan(request)


@dataclass(frozen=True, slots=True)
class _Priced:
    """A plan with its price.

    missed    by how much its prediction exceeds the objectives, as a share of them
    seconds   of all requests
    """

    missed: float
    seconds: float
    prompt: PromptPart
    answer: AnswerPart | None
    hand_over_s: float

    def plan(self, request: RoutedRequest) -> Plan:
        prompt, answer = self.prompt, self.answer
        if answer is None:
            prediction = Prediction(prompt.first_token_s, None, prompt.computed_tokens)
            return Plan(prompt.node.name, None, prompt.fetch_from, prediction, "one token")
        gap_s = (self.hand_over_s + answer.rest_s) / max(request.answer_tokens, 1)
        prediction = Prediction(answer.wait_s + prompt.first_token_s, gap_s, prompt.computed_tokens)
        return Plan(prompt.node.name, answer.node.name, prompt.fetch_from, prediction, self._reason(request))

    def _reason(self, request: RoutedRequest) -> str:
        if self.prompt.fetch_from is not None:
            return "fetched"
        if self.answer is not None and self.prompt.node is not self.answer.node:
            return "handed over"
        return "resumed" if self.prompt.computed_tokens < request.num_tokens else "computed"


def _plans(request: RoutedRequest, nodes: Sequence[Candidate]) -> Iterator[_Priced]:
    """The plans of which one is the best."""
    prompts = {node.name: prompt_part(request, node) for node in nodes if node.may_prefill}
    best_prompts = nsmallest(PAIRED, prompts.values(), key=_prompt_seconds)
    fetched = _fetched(request, nodes, best_prompts)
    if not request.needs_decode:
        yield from (_priced(request, prompt, None, 0.0) for prompt in [*prompts.values(), *fetched])
        return
    answers = {node.name: answer_part(request, node) for node in nodes if node.may_decode}
    yield from (_priced(request, prompts[name], answers[name], 0.0) for name in answers if name in prompts)
    for answer in nsmallest(PAIRED, answers.values(), key=_answer_seconds):
        for prompt in [*best_prompts, *fetched]:
            seconds = hand_over_s(request, prompt.node, answer.node)
            if prompt.node is not answer.node and seconds is not None:
                yield _priced(request, prompt, answer, seconds)


def _fetched(request: RoutedRequest, nodes: Sequence[Candidate], prompts: Iterable[PromptPart]) -> list[PromptPart]:
    """The same prompts, computed from what other nodes hold and these lack."""
    holders = nsmallest(HOLDERS, nodes, key=lambda node: -node.hit.state_tokens)
    parts = (
        fetched_prompt_part(request, prompt.node, holder)
        for prompt in prompts
        for holder in holders
        if holder is not prompt.node and holder.hit.state_tokens > prompt.node.hit.resumable_tokens
    )
    return [part for part in parts if part is not None]


def _prompt_seconds(part: PromptPart) -> float:
    return part.seconds


def _answer_seconds(part: AnswerPart) -> float:
    return part.seconds


def _priced(request: RoutedRequest, prompt: PromptPart, answer: AnswerPart | None, hand_over_s: float) -> _Priced:
    objectives = request.objectives
    if answer is None:
        missed = _missed(request.waited_s + prompt.first_token_s, objectives.first_token_s)
        return _Priced(missed, prompt.seconds + prompt.stored_s, prompt, None, 0.0)
    missed = _missed(request.waited_s + answer.wait_s + prompt.first_token_s, objectives.first_token_s)
    missed += _missed(answer.token_gap_s, objectives.token_gap_s) + (not prompt.keeps_gap)
    stored_s = 0.0 if prompt.node is answer.node else prompt.stored_s
    return _Priced(missed, prompt.seconds + answer.seconds + hand_over_s + stored_s, prompt, answer, hand_over_s)


def _missed(seconds: float, objective_s: float | None) -> float:
    """How much longer these seconds are than the objective, as a share of it."""
    return 0.0 if objective_s is None else max(0.0, seconds / objective_s - 1)


def shortlist(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates that a best plan may name: those with the deepest hits, and those with the least to do."""
    if len(candidates) <= FEW:
        return candidates
    measures: tuple[Callable[[Candidate], float], ...] = (
        lambda node: -node.hit.resumable_tokens,
        lambda node: -node.hit.attention_tokens,
        lambda node: node.load.waiting_tokens,
        lambda node: node.load.num_decoding,
    )
    chosen: set[str] = set()
    for measure in measures:
        chosen.update(node.name for node in nsmallest(STANDING_OUT, candidates, key=measure))
    return [node for node in candidates if node.name in chosen]
