"""Drafts of the next step: which sequences have some, and how many. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.sequence import Sequence
from headrace.engine.stopping import StopRules
from headrace.speculation.drafter import DrafterFactory


class Drafting:
    """Asks drafters for the next tokens of decoding sequences, and counts how many of them were right.

    new_drafter       makes the drafter of a sequence when it first drafts
    max_drafts        of a sequence in a step at most
    max_step_drafts   of all sequences in a step at most: it has so many slots for their states, and rows
    """

    def __init__(self, new_drafter: DrafterFactory, max_drafts: int, max_step_drafts: int) -> None:
        self._new_drafter = new_drafter
        self._max_drafts = max_drafts
        self._max_step_drafts = max_step_drafts
        self._drafted: list[Sequence] = []
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def can_draft(self, sequence: Sequence, rules: StopRules) -> bool:
        """True if it decodes, and may take another token after its next one."""
        return not sequence.is_paused and not sequence.is_prefilling and rules.most_new(sequence) > 1

    def propose(self, sequences: Iterable[Sequence], rules: StopRules) -> None:
        """Sets the `drafts` of these sequences, whose tokens are all known; no other sequence has any."""
        self.forget()
        ready = [sequence for sequence in sequences if self.can_draft(sequence, rules)]
        left = self._max_step_drafts
        share = max(1, left // max(1, len(ready)))
        for sequence in ready:
            most = min(self._max_drafts, share, left, rules.most_new(sequence) - 1)
            if most < 1:
                continue
            if sequence.drafter is None:
                sequence.drafter = self._new_drafter(sequence.request)
            drafts = sequence.drafter.propose(sequence.tokens, most)[:most]
            if drafts and sequence.grammar is not None:
                drafts = sequence.grammar.allowed(drafts)
            if drafts:
                sequence.drafts = tuple(drafts)
                self._drafted.append(sequence)
                left -= len(drafts)

    def forget(self) -> bool:
        """Takes back what was proposed; False if that was nothing."""
        drafted, self._drafted = self._drafted, []
        for sequence in drafted:
            sequence.drafts = ()
        return bool(drafted)

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Counts the drafts of one sequence in a step."""
        self.drafted_tokens += num_drafts
        self.accepted_tokens += num_accepted
