"""Settings of speculation."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import at_least, one_of, refuse
from headrace.speculation.drafter import DrafterFactory
from headrace.speculation.ngram import NgramDrafter

NO_DRAFTER = "none"
DRAFTERS = (NO_DRAFTER, "ngram")


@dataclass(frozen=True)
class SpeculationConfig:
    """Settings of the drafts that a node makes (docs/speculation.md). Answers are the same with any setting.

    drafter      none, or ngram: what followed the last tokens where they occurred before in prompt and answer
    max_drafts   drafts of a request in a step at most; each has a slot for a state, of a quarter of the slots at most
    """

    drafter: str = NO_DRAFTER
    max_drafts: int = 3

    def __post_init__(self) -> None:
        refuse(
            one_of(self, DRAFTERS, "drafter"), at_least(self, 1, "max_drafts", remedy="; drafter: none turns it off")
        )

    @property
    def is_on(self) -> bool:
        return self.drafter != NO_DRAFTER


def drafter_factory(config: SpeculationConfig) -> DrafterFactory | None:
    """Returns the maker of the drafters that the config names; None: there are no drafts."""
    return (lambda request: NgramDrafter()) if config.is_on else None
