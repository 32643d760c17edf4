"""Plans of two stages: one node of least cost computes the prompt, one of least cost generates. Pure.

The frame of the baselines: they keep to roles, and a node that does both keeps the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.wire.messages import Role
from router.routing.candidates import Candidate
from router.routing.plan import Plan, Prediction, RoutedRequest

Cost = Callable[[Candidate], float]


def prefilling(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Nodes whose role computes prompts; all nodes if there are none of them."""
    return [node for node in candidates if node.role is not Role.DECODE] or candidates


def decoding_behind(node: Candidate, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Nodes that may generate after `node` has computed the prompt: itself alone if it also decodes or has no other."""
    if node.role is not Role.PREFILL:
        return (node,)
    reached = [other for other in candidates if other.role is not Role.PREFILL and other.name in node.links]
    return reached or (node,)


def two_stages(
    request: RoutedRequest, candidates: Sequence[Candidate], *, prefill: Cost, decode: Cost, reason: str
) -> Plan | None:
    """The plan of least cost in each stage; nodes of equal costs take turns. None without candidates."""
    if not candidates:
        return None
    first = least(prefilling(candidates), prefill, request.number)
    if not request.needs_decode:
        return plan_of(request, first, None, reason)
    return plan_of(request, first, least(decoding_behind(first, candidates), decode, request.number), reason)


def plan_of(request: RoutedRequest, prefill: Candidate, decode: Candidate | None, reason: str) -> Plan:
    """The plan of these nodes, with what the prefill node has to compute."""
    reused = 0 if request.is_scored else min(prefill.hit.resumable_tokens, request.num_tokens - 1)
    computed = Prediction(computed_tokens=request.num_tokens - reused)
    return Plan(prefill.name, None if decode is None else decode.name, prediction=computed, reason=reason)


def least(nodes: Sequence[Candidate], cost: Cost, turn: int) -> Candidate:
    """A node of least cost; those of equal costs take turns, else the first by name would get all idle time's work."""
    costs = [cost(node) for node in nodes]
    lowest = min(costs)
    equal = [node for node, each in zip(nodes, costs, strict=True) if each == lowest]
    return equal[turn % len(equal)]
