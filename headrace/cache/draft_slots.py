"""Slots set aside for states that rest on a step's drafts."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cache.claims import Claim
from headrace.cache.types import SlotId


class DraftSlots:
    """Slots that are kept for drafts. So drafts cost no other request its checkpoint, and no step waits for a slot.

    Where layers keep tails, a sequence with drafts takes at most one slot in a step: for the state that the step writes
    behind a draft. Where they keep none, it takes one for the state after each of its tokens but the last.

    If a state in one of these slots counts, its slot becomes the claim's, and the claim's old slot takes its place. At
    the end of the step all are given back.
    """

    def __init__(self, slots: Sequence[SlotId]) -> None:
        self.total = len(slots)
        self._free = list(slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_slots: int) -> list[SlotId]:
        """Raises ValueError if fewer are free: a step is planned within `num_free`."""
        if num_slots > len(self._free):
            raise ValueError(f"{num_slots} slots for drafts, and {len(self._free)} of {self.total} are free")
        return [self._free.pop() for _ in range(num_slots)]

    def accept(self, claim: Claim, taken: list[SlotId], slot: SlotId) -> None:
        """Makes the state in `slot`, one of `taken`, the running state of `claim`, whose own slot takes its place."""
        claim.require_held()
        taken[taken.index(slot)], claim.slot = claim.slot, slot

    def give_back(self, taken: list[SlotId]) -> None:
        """Empties `taken`."""
        self._free += taken
        taken.clear()
