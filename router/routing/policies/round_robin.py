"""Nodes in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.routing.candidates import Candidate
from router.routing.plan import Plan, RoutedRequest
from router.routing.policies.stages import two_stages


@dataclass(frozen=True)
class RoundRobin:
    """The nodes of each role in turn, whatever they hold or have to do."""

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan | None:
        return two_stages(request, candidates, prefill=_equal, decode=_equal, reason="turn")


def _equal(node: Candidate) -> float:
    return 0.0
