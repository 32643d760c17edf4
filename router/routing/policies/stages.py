"""Plans of two stages: one node of least cost computes the prompt, one of least cost generates. Pure.

The frame of the baselines: they keep to roles, and a node that does both keeps the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.wire.node_messages import Role
from router.routing.candidates import Candidate
from router.routing.fetching import deepest_holder
from router.routing.plan import Plan, Prediction, RoutedRequest

Cost = Callable[[Candidate], float]


def prefilling(request: RoutedRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Nodes whose role computes prompts, and with them decode nodes that none of these reaches. Only nodes with
    somebody to generate behind them, if that is needed."""
    decoding = [node for node in candidates if node.may_decode and node.role is not Role.PREFILL]
    able = [
        node
        for node in candidates
        if node.may_prefill
        and (node.may_decode or not request.needs_decode or any(other.name in node.links for other in decoding))
    ]
    of_role = [node for node in able if node.role is not Role.DECODE]
    return [
        node
        for node in able
        if node.role is not Role.DECODE or not any(node.name in sender.links for sender in of_role)
    ]


def decoding_behind(node: Candidate, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Nodes that may generate after `node` has computed the prompt: itself alone if it also decodes or has no other."""
    own = (node,) if node.may_decode else ()
    if own and node.role is not Role.PREFILL:
        return own
    able = (other for other in candidates if other.may_decode and other.role is not Role.PREFILL)
    return [other for other in able if other.name in node.links] or own


def two_stages(
    request: RoutedRequest, candidates: Sequence[Candidate], *, prefill: Cost, decode: Cost, reason: str
) -> Plan | None:
    """The plan of least cost in each stage; nodes of equal costs take turns. None if nobody can serve the request."""
    nodes = prefilling(request, candidates)
    if not nodes:
        return None
    first = least(nodes, prefill, request)
    if not request.needs_decode:
        return plan_of(request, candidates, first, None, reason)
    second = least(decoding_behind(first, candidates), decode, request)
    return plan_of(request, candidates, first, second, reason)


def plan_of(
    request: RoutedRequest, candidates: Sequence[Candidate], prefill: Candidate, decode: Candidate | None, reason: str
) -> Plan:
    """The plan of these nodes, with what the prefill node has to compute. A node that also generates does not fetch."""
    reused = 0 if request.is_scored else min(prefill.hit.resumable_tokens, request.num_tokens - 1)
    fetch_from = None if decode is prefill else deepest_holder(request, candidates, prefill)
    computed = Prediction(computed_tokens=request.num_tokens - reused)
    return Plan(prefill.name, None if decode is None else decode.name, fetch_from, computed, reason)


def least(nodes: Sequence[Candidate], cost: Cost, request: RoutedRequest) -> Candidate:
    """A node of least cost. Of equal costs it is one of the request's session, else they take turns: the first by name
    would get all idle time's work."""
    costs = [cost(node) for node in nodes]
    lowest = min(costs)
    equal = [node for node, each in zip(nodes, costs, strict=True) if each == lowest]
    known = [node for node in equal if node.name in request.session_nodes]
    return known[0] if known else equal[request.number % len(equal)]
