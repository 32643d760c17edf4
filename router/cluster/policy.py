"""Routing policies: pure choices among live nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.request import Request
from headrace.wire.messages import NodeInfo


class Policy(Protocol):
    """Picks nodes of one role; each role has its own object."""

    def pick(self, candidates: Sequence[NodeInfo], request: Request) -> NodeInfo:
        """Returns one of `candidates`, of which there is at least one, sorted by name."""
        ...


class RoundRobin:
    """Nodes in turn by name, also while nodes come and go."""

    def __init__(self) -> None:
        self._last = ""

    def pick(self, candidates: Sequence[NodeInfo], request: Request) -> NodeInfo:
        chosen = next((node for node in candidates if node.name > self._last), candidates[0])
        self._last = chosen.name
        return chosen
