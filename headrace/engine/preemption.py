"""Who gives way when a running request needs a block and there is none to be had: pure, asked one question."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from headrace.engine.sequence import Sequence


class VictimPolicy(Protocol):
    """Which of the running requests is preempted. The one that needs the block is among them."""

    def victim(self, running: Iterable[Sequence]) -> Sequence: ...


class LatestArrival:
    """The one that came last has the least to lose.

    The oldest request never gives way to another: it ends, so the next oldest ends, and so do they all.
    """

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=lambda sequence: sequence.arrival)
