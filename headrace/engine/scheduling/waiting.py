"""The waiting line: new jobs that hold nothing yet, and preempted ones that hold nothing any more."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping

from headrace.engine.sequence import Sequence
from headrace.step_costs import overtakes

MOST_PASSES = 3
"""So many in a row may be admitted before the one that arrived first: none starves."""


class WaitingLine:
    """Preempted sequences first, in order of arrival, then the new ones, which leave at their deadline.

    New sequences are admitted by three criteria, in this order:

    client    first that of the client with the fewest requests on the node: slots and blocks are shared by clients, so
              one client's many slow requests do not keep out the first request of another
    length    prompts less than half as long as the one that arrived first come before it, the shortest first: a short
              prompt does not wait until a full cache has room for a long one
    arrival   the earliest first

    `MOST_PASSES` such short prompts take at most one and a half times the room of the one that they pass, so it waits
    for them at most two and a half times as long as without them.
    """

    def __init__(self) -> None:
        self._passes = 0  # admitted in a row before one that had arrived earlier
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

    @property
    def earliest(self) -> Sequence | None:
        """The first by arrival. Paused ones, and those that wait for another's prefix, let the others pass."""
        return next((sequence for sequence in self if sequence.may_be_admitted), None)

    def first(self, held: Mapping[int, int]) -> Sequence | None:
        """The next to be admitted; it stays in the line. `held`: requests on the node, by client."""
        earliest = self.earliest
        if earliest is None or earliest in self._preempted or self._passes >= MOST_PASSES:
            return earliest
        length = earliest.prefill_length

        def place(sequence: Sequence) -> tuple[int, int]:
            own = sequence.prefill_length
            return held.get(sequence.request.client, 0), own if overtakes(own, length) else length

        return min((s for s in self._new if s.may_be_admitted), key=place)

    def admitted(self, sequence: Sequence) -> None:
        """Takes out one that was admitted."""
        if sequence in self._new:
            self._passes = 0 if sequence is self.earliest else self._passes + 1
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the line, wherever it stands; does nothing if it is not there."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        elif sequence in self._new:
            self._new.remove(sequence)

    def expire(self, now_s: float, *, others_hold_room: bool = False) -> list[Sequence]:
        """Takes out the sequences whose deadline for admission has passed, and returns them. `others_hold_room`:
        requests on this node that wait for prompts of other nodes; see `Job.yield_by_s`."""
        late = [each for each in self._new if each.admit_by_s(others_hold_room=others_hold_room) <= now_s]
        for sequence in late:
            self._new.remove(sequence)
        return late

    def next_deadline_s(self, *, others_hold_room: bool = False) -> float | None:
        """When `expire` has something to take out; None if it never will."""
        return min((each.admit_by_s(others_hold_room=others_hold_room) for each in self._new), default=None)
