"""The node with the least to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.routing.candidates import Candidate
from router.routing.plan import Plan, RoutedRequest
from router.routing.policies.stages import two_stages


@dataclass(frozen=True)
class LeastLoaded:
    """The fewest tokens in hand: of prompts that wait and of contexts that decode. It does not see caches."""

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan | None:
        return two_stages(request, candidates, prefill=_tokens, decode=_tokens, reason="load")


def _tokens(node: Candidate) -> float:
    return node.load.waiting_tokens + node.load.context_tokens
