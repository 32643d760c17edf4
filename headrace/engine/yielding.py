"""Which answers leave a step to those of others: those of clients that have had more than their share. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.sequence import Sequence
from headrace.step_costs import StepCosts, StepShape

LIGHT_SHARE = 3 / 4
"""Share of a step that lighter clients have beside heavier ones."""


def yielding_answers(decoding: Iterable[Sequence], costs: StepCosts, least_row: float) -> set[Sequence]:
    """Returns those of these that take no part in a step, so that it is LIGHT_SHARE the others' by predicted time.

    Of those of clients beyond their share one takes part whatever it costs, the first: none starves. All do if nobody
    else decodes.

    decoding    longest wait for a step first
    least_row   what an answer adds to a step at the least, as a share of `step_s`, whatever was measured
    """
    ordinary: list[Sequence] = []
    beyond: list[Sequence] = []
    for sequence in decoding:
        (beyond if sequence.exceeds else ordinary).append(sequence)
    if not ordinary:
        return set()
    alone = StepShape(len(ordinary), sum(sequence.num_computed for sequence in ordinary))
    left_s = (1 / LIGHT_SHARE - 1) * costs.decode_part_s(alone)
    row_s = max(costs.decode_s, least_row * costs.step_s)
    for num_taken, sequence in enumerate(beyond):
        left_s -= row_s + costs.context_s * sequence.num_computed
        if left_s < 0 and num_taken:
            return set(beyond[num_taken:])
    return set()
