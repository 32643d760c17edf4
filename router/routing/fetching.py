"""The choice of a node to fetch from, for policies that do not weigh it themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.candidates import Candidate
from router.routing.plan import RoutedRequest


def deepest_holder(request: RoutedRequest, candidates: Sequence[Candidate], prefill: Candidate) -> str | None:
    """The node with the prompt's deepest checkpoint that can send to `prefill`; None if that has one as deep.

    The node that computes the prompt decides whether a fetch is worth its time (`node_runtime/fetch_policy.py`).
    """
    if not request.may_fetch or request.is_scored:
        return None
    holders = [each for each in candidates if each is not prefill and prefill.name in each.links]
    best = max(holders, key=lambda each: each.hit.state_tokens, default=None)
    if best is None or best.hit.state_tokens <= prefill.hit.resumable_tokens:
        return None
    return best.name
