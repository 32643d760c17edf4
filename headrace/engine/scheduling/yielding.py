"""Answers that leave a step to answers of others, because their own clients have had more than their share. Pure.

While answers of other clients decode, the answers of clients over their share lengthen most steps by BETWEEN_TURNS at
most. One step of TURN_STEPS is their turn: it takes as many of them as fit into what is left of a third (TURN_ADDS) of
the time that these steps took for the others, and at least one, whatever it costs. So clients over their share keep a
quarter of the time, and 19 of 20 gaps between tokens of the others are hardly longer for it. A step in which no answer
of others decodes is all theirs, and the count of steps begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.cache.publishing import ScheduledChunk
from headrace.engine.sequence import Sequence
from headrace.step_costs import StepCosts, StepShape

LIGHT_SHARE = 3 / 4
"""Share of a step that lighter clients have beside heavier ones."""

BETWEEN_TURNS = 1 / 8
"""Part of a step of others by which answers of clients beyond their share lengthen it at most, between their turns."""
TURN_ADDS = 1 / LIGHT_SHARE - 1
"""The same of all steps from one turn to the next."""

TURN_STEPS = 24
"""Steps with answers of others from one turn to the next: above 20, so that nineteen of twenty are without one."""


@dataclass(frozen=True)
class Yielded:
    """Steps that answers of clients beyond their share have left to others since their last turn.

    num_steps   steps in which answers of others decoded: at TURN_STEPS - 1 the next one is a turn
    left_s      of TURN_ADDS of the time that these took for the others: the rest was used between turns
    """

    num_steps: int = 0
    left_s: float = 0.0

    @property
    def is_turn(self) -> bool:
        """True if the next step with answers of others is the turn of those beyond their share."""
        return self.num_steps + 1 >= TURN_STEPS

    def after(self, chunks: Iterable[ScheduledChunk[Sequence]], costs: StepCosts, least_row: float) -> Yielded:
        """With a step of these chunks."""
        decoding = [chunk.sequence for chunk in chunks if not chunk.sequence.is_prefilling]
        ordinary = [sequence for sequence in decoding if not sequence.is_over_share]
        if not ordinary:
            return Yielded() if decoding else self
        beyond = [sequence for sequence in decoding if sequence.is_over_share]
        if beyond and self.is_turn:
            return Yielded()
        added_s = TURN_ADDS * _alone_s(ordinary, costs)
        spent_s = sum(_row_s(sequence, costs, least_row) for sequence in beyond)
        # Nobody saves up for more than a turn: a crowd that comes to a node of long answers has no claim on their time.
        num_steps = min(self.num_steps + 1, TURN_STEPS - 1)
        return Yielded(num_steps, min(self.left_s + added_s - spent_s, num_steps * added_s))


NOTHING_YIELDED = Yielded()


def yielding_answers(
    decoding: Iterable[Sequence], costs: StepCosts, least_row: float, yielded: Yielded
) -> set[Sequence]:
    """Returns those of these that take no part in a step; none if nobody else decodes.

    decoding    longest wait for a step first
    least_row   what an answer adds to a step at the least, as a share of `step_s`, whatever was measured
    yielded     in the steps before
    """
    ordinary: list[Sequence] = []
    beyond: list[Sequence] = []
    for sequence in decoding:
        (beyond if sequence.is_over_share else ordinary).append(sequence)
    if not ordinary:
        return set()
    alone_s = _alone_s(ordinary, costs)
    left_s = yielded.left_s + TURN_ADDS * alone_s if yielded.is_turn else BETWEEN_TURNS * alone_s
    yielding: set[Sequence] = set()
    for number, sequence in enumerate(beyond):
        row_s = _row_s(sequence, costs, least_row)
        if row_s <= left_s or (yielded.is_turn and number == 0):
            left_s -= row_s
        else:
            yielding.add(sequence)
    return yielding


def _alone_s(ordinary: list[Sequence], costs: StepCosts) -> float:
    """A step of these answers."""
    return costs.decode_part_s(StepShape(len(ordinary), sum(sequence.num_computed for sequence in ordinary)))


def _row_s(sequence: Sequence, costs: StepCosts, least_row: float) -> float:
    return max(costs.decode_s, least_row * costs.step_s) + costs.context_s * sequence.num_computed
