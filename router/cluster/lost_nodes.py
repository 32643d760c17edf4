"""Nodes that were lost without leaving: a supervisor starts them again, so their return is worth waiting for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.wire.node_messages import NodeInfo, Role


@dataclass(frozen=True)
class LostNode:
    """A node that is not there and has not left. `at_s`: when it was lost."""

    info: NodeInfo
    at_s: float

    @property
    def expected_at_s(self) -> float:
        """When it should be back, if its next start takes as long as its last."""
        return self.at_s + self.info.start_s


class LostNodes:
    """Lost nodes by name, each awaited for `return_timeout_s`. `does`: whether nodes of a role do some work."""

    def __init__(self, return_timeout_s: float, does: Callable[[Role, Role], bool]) -> None:
        self.return_timeout_s = return_timeout_s
        self._does = does
        self._lost: dict[str, LostNode] = {}

    def add(self, info: NodeInfo, now_s: float) -> None:
        self._lost[info.name] = LostNode(info, now_s)

    def remove(self, name: str) -> None:
        """Forgets a node that is back, or has left."""
        self._lost.pop(name, None)

    def awaited(self, work: Role, now_s: float) -> list[LostNode]:
        """Nodes for this work that may still come back, the next one first."""
        self._lost = {name: node for name, node in self._lost.items() if now_s - node.at_s < self.return_timeout_s}
        found = [node for node in self._lost.values() if self._does(node.info.role, work)]
        return sorted(found, key=lambda node: node.expected_at_s)
