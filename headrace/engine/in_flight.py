"""A step that was launched and whose tokens the host does not know yet."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.publishing import Share
from headrace.engine.runner import Launched
from headrace.engine.sequence import Sequence


@dataclass(frozen=True)
class InFlight:
    """Between `ModelRunner.launch` and the tokens that it draws.

    places    who gets these tokens, and where they stand among the launch's draws
    may_wait  the next step may be launched before they are known
    """

    shares: list[Share]
    places: dict[Sequence, int]
    launched: Launched
    may_wait: bool
