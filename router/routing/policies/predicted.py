"""The policy `predicted`: the plan that adds least to the time of all requests, within the objectives. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from operator import attrgetter
from typing import NamedTuple

from headrace.wire.node_messages import Role
from router.routing.candidates import Candidate
from router.routing.plan import NO_OBJECTIVES, Plan, Prediction, RoutedRequest
from router.routing.policies.cost import (
    AnswerPart,
    PromptPart,
    answer_part,
    fetched_prompt_part,
    gap_relief_s,
    hand_over_s,
    held_back_s,
    meeting,
    prompt_part,
)
from router.routing.policies.times import answers_at_once, least_step_s

FEW = 24
"""So many candidates are all priced; of more, only those that stand out by their hits or by their load."""
STANDING_OUT = 6
"""Candidates that are kept of many, by each measure."""
MEASURES = (
    lambda node: -node.hit.resumable_tokens,
    lambda node: -node.hit.attention_tokens,
    attrgetter("load.waiting_tokens"),
    attrgetter("load.num_decoding"),
)
MOST_USE_BY_FEW_PROMPTS = 0.5
"""Use of the nodes that are meant for prompts, if these computed them all, below which no node need be kept free for
prompts. Measured on simulated answers of 300 to 1,000 tokens (docs/routing.md)."""
PAIRED = 3
"""Nodes, by the price of the prompt and by that of the answer, whose pairs are compared."""
_seconds = attrgetter("seconds")
_state_tokens = attrgetter("hit.state_tokens")


class Predicted:
    """Compares plans by their predicted seconds: the request's own, and what it adds to those of the others.

    A plan within the objectives goes before any that misses one; among those that miss, the one that misses least.
    """

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan | None:
        turn = request.number % max(len(candidates), 1)
        nodes = [*candidates[turn:], *candidates[:turn]]  # the first of equals wins: they take turns
        if request.session_nodes:
            nodes.sort(key=lambda node: node.name not in request.session_nodes)
        listed = shortlist(nodes)
        if request.caches_are_short or _prompts_are_few(candidates):
            # Roles count for nothing: each node generates from what its own cache keeps.
            listed = [node if node.role is Role.BOTH else node._replace(role=Role.BOTH) for node in listed]
        best = _best(request, listed)
        return None if best is None else best.plan(request)


def _prompts_are_few(candidates: Sequence[Candidate]) -> bool:
    """True if the nodes that are meant for prompts, but may generate, would have little to do with prompts alone."""
    prefill = Role.PREFILL  # once, and lists: there may be a thousand nodes
    num_meant = len([None for node in candidates if node.role is prefill and node.may_decode])
    return num_meant > 0 and sum([node.load.prompt_use for node in candidates]) < MOST_USE_BY_FEW_PROMPTS * num_meant


class _Priced(NamedTuple):
    """A plan with its price.

    missed        by how much its prediction exceeds the objectives, as a share of them
    seconds       of all requests
    held_back_s   from the prompt's first token until the client gets it
    """

    missed: float
    seconds: float
    prompt: PromptPart
    answer: AnswerPart | None
    hand_over_s: float
    held_back_s: float

    def plan(self, request: RoutedRequest) -> Plan:
        prompt, answer = self.prompt, self.answer
        relief_s = self._relief_s(request) if self.missed else 0.0
        if answer is None:
            prediction = Prediction(prompt.first_token_s, None, prompt.computed_tokens)
            return Plan(prompt.node.name, None, prompt.fetch_from, prediction, "one token", relief_s)
        first_token_s = answer.wait_s + prompt.first_token_s + self.held_back_s
        gap_s = (self.hand_over_s + answer.rest_s - self.held_back_s) / max(request.answer_tokens, 1)
        prediction = Prediction(first_token_s, gap_s, prompt.computed_tokens)
        return Plan(prompt.node.name, answer.node.name, prompt.fetch_from, prediction, self._reason(request), relief_s)

    def _relief_s(self, request: RoutedRequest) -> float:
        """By how much the first token comes too late, or until as many answers have ended as make the gap too long."""
        prompt, answer, objectives = self.prompt, self.answer, request.objectives
        first_s, relief_s = request.waited_s + prompt.first_token_s + self.held_back_s, 0.0
        if answer is not None:
            first_s += answer.wait_s
            load, num_tokens = answer.node.load, max(request.answer_tokens, 1)
            at_once = answers_at_once(load, answer.node.costs, num_tokens * load.answer_pace)
            relief_s = gap_relief_s(request, answer.node, answer.token_gap_s, at_once)
        if not prompt.keeps_gap:
            node, load = prompt.node, prompt.node.load
            decoding = load.num_decoding, load.context_tokens
            relief_s = max(relief_s, gap_relief_s(request, node, least_step_s(node), decoding))
        return max(relief_s, first_s - (objectives.first_token_s or first_s))

    def _reason(self, request: RoutedRequest) -> str:
        if self.prompt.fetch_from is not None:
            return "fetched"
        if self.answer is not None and self.prompt.node is not self.answer.node:
            return "handed over"
        return "resumed" if self.prompt.computed_tokens < request.num_tokens else "computed"


def _best(request: RoutedRequest, nodes: Sequence[Candidate]) -> _Priced | None:
    """The cheapest plan of those that miss the objectives least."""
    objectives, waited_s = request.objectives, request.waited_s
    has_objectives = objectives is not NO_OBJECTIVES and objectives != NO_OBJECTIVES
    needs_answer = request.needs_decode
    met = [meeting(request, node) for node in nodes]
    prompts = [prompt_part(request, each) for each in met if each.node.may_prefill]
    answers = {each.node.name: answer_part(request, each) for each in met if each.node.may_decode and needs_answer}
    best: _Priced | None = None

    def prompt_price(part: PromptPart) -> tuple[float, float]:
        missed = _missed(waited_s + part.first_token_s, objectives.first_token_s) + (not part.keeps_gap)
        return missed, part.seconds

    def answer_price(part: AnswerPart) -> tuple[float, float]:
        missed = _missed(part.token_gap_s, objectives.token_gap_s)
        return missed + _missed(waited_s + part.wait_s, objectives.first_token_s), part.seconds

    best_prompts = sorted(prompts, key=prompt_price if has_objectives else _seconds)[:PAIRED]
    fetched = _fetched(request, nodes, best_prompts) if request.may_fetch else []
    for prompt in [*prompts, *fetched]:
        own = answers.get(prompt.node.name)
        if own is None:
            best = best if needs_answer else _better(best, request, prompt, None, 0.0)
        elif best is None or has_objectives or prompt.seconds + own.seconds - own.received_s < best.seconds:
            best = _better(best, request, prompt, own, 0.0)
    senders = [*best_prompts, *fetched]
    for answer in sorted(answers.values(), key=answer_price if has_objectives else _seconds)[:PAIRED]:
        for prompt in senders:
            is_too_dear = best is not None and prompt.seconds + answer.seconds > best.seconds and not has_objectives
            if prompt.node is not answer.node and not is_too_dear:
                seconds = hand_over_s(request, prompt.node, answer.node)
                if seconds is not None:
                    best = _better(best, request, prompt, answer, seconds)
    return best


def _fetched(request: RoutedRequest, nodes: Sequence[Candidate], prompts: Iterable[PromptPart]) -> list[PromptPart]:
    """The same prompts, each computed from the deepest checkpoint that its node can get from another."""
    holders = sorted(nodes, key=_state_tokens, reverse=True)
    found = []
    for prompt in prompts:
        for holder in holders:
            if holder.hit.state_tokens <= prompt.node.hit.resumable_tokens:
                break
            if (part := fetched_prompt_part(request, prompt.node, holder)) is not None:
                found.append(part)
                break
    return found


def _better(
    best: _Priced | None, request: RoutedRequest, prompt: PromptPart, answer: AnswerPart | None, hand_over_s: float
) -> _Priced:
    """This plan or `best`, whichever misses less, or else costs less."""
    seconds, first_s, gap_s = prompt.seconds + hand_over_s, request.waited_s + prompt.first_token_s, 0.0
    held_s = 0.0
    if answer is not None:
        seconds += answer.seconds
        if answer.node is prompt.node:
            seconds -= answer.received_s
        else:  # reserved until the prompt's turn has come
            # Its first token is priced as everywhere, without the prompts that overtake it.
            seconds += answer.held_share * (prompt.seconds - prompt.others_s)
            held_s = held_back_s(request, answer, hand_over_s)
        first_s, gap_s = first_s + answer.wait_s + held_s, answer.token_gap_s
    missed, objectives = 0.0, request.objectives
    if objectives is not NO_OBJECTIVES:
        missed = _missed(first_s, objectives.first_token_s) + _missed(gap_s, objectives.token_gap_s)
        missed += not prompt.keeps_gap
    if best is None or (missed, seconds) < (best.missed, best.seconds):
        return _Priced(missed, seconds, prompt, answer, hand_over_s, held_s)
    return best


def _missed(seconds: float, objective_s: float | None) -> float:
    """How much longer these seconds are than the objective, as a share of it."""
    return 0.0 if objective_s is None else max(0.0, seconds / objective_s - 1)


def shortlist(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates that a best plan may name: those with the deepest hits, and those with the least to do."""
    if len(candidates) <= FEW:
        return candidates
    chosen: set[str] = set()
    for measure in MEASURES:
        chosen.update(node.name for node in nsmallest(STANDING_OUT, candidates, key=measure))
    return [node for node in candidates if node.name in chosen]
