"""How many tokens of other prompts are computed before one that comes or runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.sequence import Sequence
from headrace.step_costs import LONG_BESIDE_SHORT, overtakes


def tokens_before(
    sequence: Sequence, running: Iterable[Sequence], waiting: Iterable[Sequence], *, own: int, is_full: bool
) -> int:
    """Returns about how many tokens of other prompts are computed before `own` tokens of a sequence.

    The others are the prompts that run, and those that wait and were preempted or arrived before the sequence. Prompts
    more than twice as long as the sequence's share the steps with it, and so do newer ones: together they compute at
    most half as many tokens as it does (see `Scheduler`). The rest of the others come first as a whole.

    If the cache is full, all the others come first, but for long prompts that the sequence passes in the waiting line
    (see `WaitingLine`): only one of these counts.
    """
    others = [(other, left_of(other)) for other in running if other is not sequence]
    others += [(s, s.num_expected) for s in waiting if s.num_preemptions or s.arrival < sequence.arrival]
    if is_full:
        passed = [left for other, left in others if _passes(sequence, other)]
        return sum(left for _, left in others) - sum(passed[1:])
    whole = own if sequence.claim is None else left_of(sequence)
    beside = sum(left for other, left in others if overtakes(whole, left) or sequence.arrival < other.arrival)
    return sum(left for _, left in others) - beside + min(beside, int(LONG_BESIDE_SHORT * own))


def left_of(sequence: Sequence) -> int:
    """Returns the leading tokens that it has yet to compute before it decodes."""
    return max(0, sequence.prefill_length - sequence.num_computed)


def _passes(sequence: Sequence, other: Sequence) -> bool:
    """True if the other one waits for room, too, and is so much longer that `sequence` may be admitted before it."""
    waits = other.claim is None and not other.num_preemptions
    return waits and overtakes(sequence.prefill_length, other.prefill_length)
