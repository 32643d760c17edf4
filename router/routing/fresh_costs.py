"""Step costs of nodes as far as they are fresh: a node that is passed over is taken to be like those that work. Pure.

A node fits its costs to its own steps. If these took long for a while, because another program had the device or the
host was busy, a router that believed the fit would give the node no more such work, and so the fit would never mend. So
a part of a node's costs, that of its decodes or that of its prompts, counts for as long as the node does such work, or
no other one does. After PASSED_OVER_S in which others did, that of the node that did last counts. The next steps of
such work then say what the node takes by now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace.step_costs import PROMPT_SECONDS, StepCosts
from headrace.wire.node_messages import NodeInfo, NodeStatus

PASSED_OVER_S = 5.0
"""A slow node among fast ones is tried so often, too: with a request in so many seconds, at the most."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "sampled_tokens": ("step_s", "decode_s", "context_s", "check_s", "draft_s"),
    PROMPT_SECONDS: ("chunk_s", "token_s", "depth_s"),
}
"""The costs that each kind of work shows, by the counter that grows with it."""


@dataclass
class _Reported:
    """A node's last heartbeat. By counter: `counted`, and `idle_s`, for how long others did the work meanwhile."""

    incarnation: int
    at_s: float
    counted: dict[str, float]
    idle_s: dict[str, float]


class _Worker(NamedTuple):
    """The node of a kind of device that was last seen at work."""

    name: str
    at_s: float
    costs: StepCosts


class FreshCosts:
    """The costs to reckon with, by what nodes report."""

    def __init__(self) -> None:
        self._reported: dict[str, _Reported] = {}
        self._last: dict[tuple[str, str], _Worker] = {}  # by kind of device and counter

    def heartbeat(self, info: NodeInfo, status: NodeStatus, now_s: float) -> StepCosts:
        """Returns the node's own costs as far as they are fresh, or the node does not count its work."""
        counted = {counter: status.counters[counter] for counter in PARTS if counter in status.counters}
        before = self._reported.get(info.name)
        if before is None or before.incarnation != info.incarnation:
            before = _Reported(info.incarnation, now_s, counted, dict.fromkeys(PARTS, 0.0))
        costs, idle_s = status.costs, before.idle_s
        for counter, number in counted.items():
            kind = info.device, counter
            last = self._last.get(kind)
            if number > before.counted.get(counter, number):
                idle_s[counter] = 0.0
                self._last[kind] = _Worker(info.name, now_s, status.costs)
            elif last is not None and last.name != info.name:
                if last.at_s >= before.at_s:
                    idle_s[counter] += now_s - before.at_s
                if idle_s[counter] >= PASSED_OVER_S:
                    costs = replace(costs, **{name: getattr(last.costs, name) for name in PARTS[counter]})
        self._reported[info.name] = _Reported(info.incarnation, now_s, counted, idle_s)
        return costs

    def keep(self, names: Collection[str]) -> None:
        """Forgets all other nodes."""
        self._reported = {name: reported for name, reported in self._reported.items() if name in names}
        self._last = {kind: last for kind, last in self._last.items() if last.name in names}
