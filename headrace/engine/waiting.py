"""The waiting line: new jobs that hold nothing yet, and preempted ones that hold nothing any more."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from headrace.engine.sequence import Sequence


class WaitingLine:
    """Preempted sequences first, then the new ones, which leave at their deadline; both in order of arrival."""

    def __init__(self) -> None:
        self._preempted: list[Sequence] = []
        self._new: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._new

    @property
    def preempted(self) -> tuple[Sequence, ...]:
        return tuple(self._preempted)

    def join(self, sequence: Sequence) -> None:
        """Adds a new one behind those that came to the router before it: one that was sent on keeps its place."""
        insort(self._new, sequence, key=lambda s: s.arrival)

    def put_back(self, sequence: Sequence) -> None:
        """Adds a preempted one before every new one. It was admitted once, so its deadline no longer counts."""
        insort(self._preempted, sequence, key=lambda s: s.arrival)

    def first(self) -> Sequence | None:
        """The next to be admitted; it stays in the line. Paused ones let the others pass."""
        return next((sequence for sequence in self if not sequence.is_paused), None)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the line, wherever it stands; does nothing if it is not there."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        elif sequence in self._new:
            self._new.remove(sequence)

    def expire(self, now_s: float) -> list[Sequence]:
        """Takes out the sequences whose deadline for admission has passed, and returns them."""
        late = [sequence for sequence in self._new if sequence.job.admit_by_s <= now_s]
        for sequence in late:
            self._new.remove(sequence)
        return late

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to take out; None if it never will."""
        return min((sequence.job.admit_by_s for sequence in self._new), default=None)
