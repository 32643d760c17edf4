"""The interface of all drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.request import Request


class Drafter(Protocol):
    """Guesses how one sequence goes on. It belongs to that sequence, and what it has learnt goes with it."""

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """At most `max_drafts` ids that may follow the prompt and answer so far; none where it has no guess.

        Each call's `tokens` begin with those of the call before.
        """
        ...


DrafterFactory = Callable[[Request], Drafter]
"""Makes the drafter of a request's sequence."""
