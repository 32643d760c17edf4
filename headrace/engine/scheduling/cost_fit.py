"""A node's own step costs, fitted to the steps that it runs. Pure: no clock.

Least squares over the latest steps, with the residual of each relative to its time, so that short and long steps weigh
alike. A ridge draws the coefficients towards the prior, scaled as the steps are: what no step has shown yet, such as
decoding on a node that only computes prompts, is in the prior's proportion to what was seen. None is negative.

    minimise  sum of ((seconds - z . u) / max(seconds, predicted))^2 + sum of ridge_i * (u_i / scale - 1)^2,  u >= 0
    z = the step's parts as the prior predicts them, costs = u * prior, scale = the best common factor of all u
    ridge_i = RIDGE, or less where u_i is known to be larger: how wrong a prior is, is a factor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from itertools import combinations_with_replacement
from operator import mul

from headrace.step_costs import StepCosts, StepShape

REMEMBERED_STEPS = 256
"""After so many steps of its kind a step's weight is 1/e: a second or two of a GPU. Kinds forget apart, so that a rare
prompt on a node that decodes is not forgotten for the decode steps after it."""

LEAST_RIDGE = 1e-3
"""The squared error of a step whose time is known to 3 %: the steps may seem to fit better than that."""

CHANGED_BY = 1.5
CHANGED_STEPS = 8
"""So many steps of a kind in a row, all off by CHANGED_BY to one side, are no outliers: the machine has changed."""

REFIT_STEPS = 16
"""Steps from one solution to the next, once there are so many; at first each step counts at once."""

KEPT_GAPS = 0.95
"""Share of the steps with prompts in them that a wanted gap between tokens is to hold for, of those for which the
device did not wait. What the rest take is the host's: on an H200 their p99 came 2 to 6 ms late whatever was in them,
and shorter steps only compute less."""

LATE_STEP = 0.02
"""Rise of `costs.late_s` with a step that is later still, as a share of its predicted time. It falls as KEPT_GAPS
asks."""

_DECODE, _PREFILL, _DRAFTS, _SECONDS = (0, 1, 2), (3, 4, 5), (6, 7), 8


def prior_costs(attention_parity_position: float) -> StepCosts:
    """Returns the costs to begin with for a model whose tokens cost twice as much at this position as at 0."""
    costs = StepCosts()
    return replace(costs, depth_s=costs.token_s / attention_parity_position)


class CostFit:
    """Fits `costs` to the `num_steps` steps observed so far.

    `costs.late_s` is a quantile that moves up a little with each step above it, and down with each below: KEPT_GAPS of
    the steps with prompts beside answers take at most so many seconds more than was predicted.

    A step that took far longer than predicted, for a first launch or a host that was suspended, pulls no more than one
    that took twice as long: it weighs little because its own time is the measure of its residual.
    """

    def __init__(self, prior: StepCosts | None = None) -> None:
        self.costs = prior or StepCosts()
        self._prior = astuple(self.costs)[:_SECONDS]
        self._kinds: dict[tuple[int, ...], _Moments] = {}  # by the columns that steps of a kind have
        self._factors = [1.0] * _SECONDS  # of the prior's costs, beside the scale
        self.num_steps = 0

    def observe(self, shape: StepShape, seconds: float, *, may_be_late: bool = True) -> None:
        """Records a step that took `seconds`; one without contents or time says nothing.

        may_be_late   False: it says nothing of `late_s`: the device waited for the host, and would have for a shorter
                      step, too
        """
        step, decode, context, chunk, token, depth, check, draft = self._prior
        columns: tuple[int, ...] = ()
        parts: tuple[float, ...] = ()
        if shape.num_decoding:
            columns, parts = _DECODE, (step, decode * shape.num_decoding, context * shape.context_tokens)
        if shape.prefill_tokens:
            columns += _PREFILL
            parts += (chunk, token * shape.prefill_tokens, depth * shape.prefill_depths)
        if shape.num_drafts:
            columns += _DRAFTS
            parts += (check, draft * shape.num_drafts)
        if seconds <= 0 or not parts:
            return
        kind = self._kinds.setdefault(columns, _Moments((*columns, _SECONDS)))
        predicted_s = self.costs.seconds(shape)
        if may_be_late and columns == (*_DECODE, *_PREFILL):
            late_s = self.costs.late_s
            late_s += LATE_STEP * predicted_s * (KEPT_GAPS - (seconds <= predicted_s + late_s))
            self.costs = replace(self.costs, late_s=max(0.0, late_s))
        has_changed = kind.add((*parts, seconds), predicted_s)
        self.num_steps += 1
        if has_changed or self.num_steps < REFIT_STEPS or self.num_steps % REFIT_STEPS == 0:
            self.costs = self._fitted()

    def _fitted(self) -> StepCosts:
        kinds = self._kinds.values()
        moments = [[0.0] * (_SECONDS + 1) for _ in range(_SECONDS + 1)]
        for kind in kinds:
            kind.add_to(moments)
        matrix = [row[:_SECONDS] for row in moments[:_SECONDS]]
        right = [row[_SECONDS] for row in moments[:_SECONDS]]
        scale = sum(right) / sum(map(sum, matrix))
        for i, row in enumerate(matrix):
            matrix[i] = [scale * scale * value for value in row]
            right[i] *= scale
        noise = moments[_SECONDS][_SECONDS] + sum(
            f * (sum(map(mul, row, self._factors)) - 2 * value)
            for f, row, value in zip(self._factors, matrix, right, strict=True)
        )
        ridge = max(LEAST_RIDGE, noise / sum(kind.num_steps for kind in kinds))
        for i, factor in enumerate(self._factors):
            weight = ridge / max(1.0, factor) ** 2
            matrix[i][i] += weight
            right[i] += weight
        self._factors = _non_negative_solution(matrix, right)
        fitted = (scale * factor * cost for factor, cost in zip(self._factors, self._prior, strict=True))
        return replace(StepCosts(*fitted), late_s=self.costs.late_s)


class _Moments:
    """Weighted sums of the products of any two of a step's parts and its seconds, for the steps of one kind.

    columns   of the values that a step of this kind has, among the eight parts and the seconds
    """

    def __init__(self, columns: tuple[int, ...]) -> None:
        self._pairs = list(combinations_with_replacement(columns, 2))
        self._sums = [0.0] * len(self._pairs)
        self.num_steps = 0.0
        self._off = 0  # steps in a row that took much longer; negative: much less

    def add(self, values: Sequence[float], predicted: float) -> bool:
        """Adds a step by its parts and seconds. True if the machine has changed."""
        seconds = values[-1]
        if seconds > CHANGED_BY * predicted:
            self._off = max(self._off, 0) + 1
        elif seconds * CHANGED_BY < predicted:
            self._off = min(self._off, 0) - 1
        else:
            self._off = 0
        has_changed = abs(self._off) >= CHANGED_STEPS
        kept = 0.5 if has_changed else 1 - 1 / REMEMBERED_STEPS
        weight = max(seconds, predicted) ** -2
        self.num_steps = kept * self.num_steps + 1
        pairs = combinations_with_replacement(values, 2)
        self._sums = [kept * old + weight * a * b for old, (a, b) in zip(self._sums, pairs, strict=True)]
        return has_changed

    def add_to(self, moments: list[list[float]]) -> None:
        """Adds the sums to a symmetric matrix over all columns."""
        for (i, j), value in zip(self._pairs, self._sums, strict=True):
            moments[i][j] += value
            if i != j:
                moments[j][i] += value


def _non_negative_solution(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x >= 0 with the least x.matrix.x / 2 - right.x, by an active set; `matrix` is positive definite."""
    free = list(range(len(right)))
    x = [0.0] * len(right)
    for _ in range(4 * len(right)):
        among_free = _solution([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
        solved = dict(zip(free, among_free, strict=True))
        x = [max(0.0, solved.get(i, 0.0)) for i in range(len(right))]
        lowest = min(free, key=solved.__getitem__)
        if solved[lowest] < 0:
            free.remove(lowest)
            continue
        pulls = {i: right[i] - sum(map(mul, matrix[i], x)) for i in range(len(right)) if i not in free}
        strongest = max(pulls, key=pulls.__getitem__, default=None)
        if strongest is None or pulls[strongest] <= 1e-9:
            break
        free.append(strongest)
    return x


def _solution(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x with matrix.x = right, by elimination; a positive definite matrix needs no pivots."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            if factor:
                row[i:] = [a - factor * b for a, b in zip(row[i:], pivot[i:], strict=True)]
    x = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        row = rows[i]
        x[i] = (row[-1] - sum(row[j] * x[j] for j in range(i + 1, len(rows)))) / row[i]
    return x
