"""The interface of all drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """At most `max_drafts` ids that may follow the prompt and answer so far; none where it has no guess."""
        ...
