"""Scheduling: which sequences run in the next step, how many tokens of each, and which one is preempted.

Pure: no tensors, no clock. B is `max_step_tokens`, the budget of a step.

Order. Decoding sequences go first: each gets its newest token and its drafts. Prompts share what the decodes leave of
the budget. Prompts with less than half as many tokens left as the prompt that arrived first are served before it, those
with the fewest tokens first, in up to SHORT_SHARE of the prompts' budget. The prompt that arrived first gets the rest.
What it leaves goes to the other prompts by arrival. So a short prompt does not wait for a long one, and prompts of one
length are computed one after another. If there are more sequences than a step takes, all decoding sequences and the
prompt that arrived first take turns.

Shares. Prompts of lighter clients are served before shorter prompts. A client is lighter if its requests took less of
this engine lately (`ClientWork`), counted in doublings of a step. If a lighter client has a prompt, all that are served
before the prompt that arrived first get up to LIGHT_SHARE instead of SHORT_SHARE. So a client that asks now and then
does not wait for one that always asks, however short its requests are. If all requests are of one client, only lengths
count. Clients over their share (`ClientWork.is_over_share`) yield to the others:

    beside answers of others   their answers take turns, by the measured costs of this node's steps: mostly in one step
                               of 24, for up to 1/4 of the time, or one answer (yielding.py)
    beside prompts of others   their prompts get at most 1/3 of what the prompts of the others cost, or one block
    only prompts of theirs     a step costs a quarter as much, so that another client's prompt, if one comes soon, waits
                               for a short step

Budget. A step has at most B tokens, and its cost is limited, too (`TokenCost`). A shared step, with decodes or with
prompts that are served before the one that arrived first, costs as much as B tokens at depth 0. So the chunks of a long
prompt shrink as it gets deeper, and it delays the next token of another request by no more than that. A step that is
not shared costs as much as B tokens at the depth of the prompt that arrived first. So a lone prompt, or prompts of one
length, take as few steps as possible, but a short prompt does not wait for deep tokens of a long one.

Token gap. If a decoding sequence's request names a gap between its tokens (`token_gap_s`), the step's predicted seconds
stay within the smallest such gap. This limit takes the place of the limit on cost. It goes by the node's measured costs
and by how late its steps come (`StepCosts.longest_s`). If the decodes leave less time than a block of the prompt that
arrived first takes, prompts still get the time of that block, but no more. Passes of prompts are padded to a few
numbers of rows (`pass_rows`), and padding takes the device as long as tokens do. So under a gap the step takes as many
tokens as its pass has rows for.

Starvation. None starves. The prompt that arrived first computes at least a block in each step in which it has its turn,
and decodes leave prompts LEAST_SHARE of a step's cost, however deep they are. Let C be the cost of a prompt and of all
prompts that arrived before it. Without decodes, the prompt is done within 6 C/B steps, or 8 C/B beside lighter clients,
and one more step for each of these prompts, whatever comes later: up to two thirds, or three quarters, of the budget go
to others, and rounding chunks down to whole blocks may cost half of the rest. This bound does not hold under a gap, nor
for a client over its share beside others: there, all of the rest may be less than a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.publishing import ScheduledChunk
from headrace.engine.scheduling.line import left_of
from headrace.engine.scheduling.load import step_shape
from headrace.engine.scheduling.step_budget import StepBudget, TokenCost
from headrace.engine.scheduling.yielding import LIGHT_SHARE, NOTHING_YIELDED, Yielded, yielding_answers
from headrace.engine.sequence import Sequence
from headrace.step_costs import SHORT_SHARE, StepCosts, StepShape, overtakes

LEAST_SHARE = 1 / 4
"""Share of a step's cost that prompts have, whatever its decodes cost."""


@dataclass(frozen=True)
class Scheduler:
    """Chooses the chunks of a step.

    max_step_tokens   budget of a step: tokens, and in shared steps their cost, too
    max_running       the most sequences in a step
    token_cost        of this node's model
    least_row         what an answer adds to a step at the least, as a share of the step's own time: steps of one size
                      do not tell
    pass_rows         numbers of rows to which passes of prompts are padded, ascending; larger ones are not padded
    """

    max_step_tokens: int
    max_running: int
    block_size: int
    token_cost: TokenCost
    least_row: float = 0.0
    pass_rows: tuple[int, ...] = ()

    def schedule(
        self, running: Iterable[Sequence], costs: StepCosts | None = None, yielded: Yielded = NOTHING_YIELDED
    ) -> list[ScheduledChunk[Sequence]]:
        """The next step's chunks. `running`: longest wait for a step first. Never empty unless `running` is.

        costs     what this node's steps take; None: not known, so that no gap between tokens is kept
        yielded   by answers of clients beyond their share, in the steps before
        """
        ready = list(running)
        prefilling = sorted((s for s in ready if s.is_prefilling), key=lambda s: s.arrival)
        head = prefilling[0] if prefilling else None
        turns = [s for s in ready if s is head or not s.is_prefilling] if prefilling else ready
        if costs is not None and any(s.is_over_share for s in turns):
            yielding = yielding_answers((s for s in turns if s is not head), costs, self.least_row, yielded)
            turns = [s for s in turns if s not in yielding]
        turns = turns[: self.max_running]
        decodes = [_newest(s) for s in turns if s is not head]
        return decodes + self._prefills(prefilling, decodes, costs) if head in turns else decodes

    def _prefills(
        self,
        prefilling: list[Sequence],
        decodes: list[ScheduledChunk[Sequence]],
        costs: StepCosts | None,
    ) -> list[ScheduledChunk[Sequence]]:
        """Chunks of prompts, at least one, in what the decodes leave of places and budget. `prefilling`: by arrival."""
        first = prefilling[0]
        places = self.max_running - len(decodes)
        level = self._level(first)
        lighter = [s for s in prefilling if self._level(s) < level]
        shorter = [s for s in prefilling if self._level(s) == level and overtakes(left_of(s), left_of(first))]
        preferred = sorted(lighter + shorter, key=lambda s: (self._level(s), left_of(s)))
        ordinary = [s for s in prefilling if not s.is_over_share]
        gap_s = smallest_gap_s(chunk.sequence for chunk in decodes)
        if gap_s is not None and costs is not None:
            budget = self.within(gap_s, step_shape(decodes), first.num_computed, costs)
            budget, least = self._filled(budget, first.num_computed), 1
        else:
            start = first.num_computed if ordinary and not decodes and not preferred else 0
            full = ChunkSpan(start, start + math.ceil(self.max_step_tokens * (1.0 if ordinary else 1 - LIGHT_SHARE)))
            budget, least = self._beside(decodes, self.token_cost.of(full)), self.block_size
        if 0 < len(ordinary) < len(prefilling):
            wanted = sum(budget.token_cost.of(ChunkSpan(s.num_computed, s.prefill_length)) for s in ordinary)
            budget = budget.at_most(wanted / LIGHT_SHARE)
        share = LIGHT_SHARE if lighter else SHORT_SHARE
        chunks = self._chunks(preferred[: places - 1], budget.part(share))
        for chunk in chunks:
            budget = budget.without(chunk.span)
        span = self._span(first, max(budget.fitting(first.num_computed), min(least, budget.num_tokens)))
        assert span is not None, "max_step_tokens is at least max_running: a token is left"
        chunks.append(ScheduledChunk(first, span))
        taken = {chunk.sequence for chunk in chunks}
        others = [sequence for sequence in prefilling if sequence not in taken]
        return chunks + self._chunks(others[: places - len(chunks)], budget.without(span))

    def work(self, chunks: list[ScheduledChunk[Sequence]], costs: StepCosts) -> list[float]:
        """Work that each chunk is for its client, in tokens at depth 0: answers share what a step costs without any.

        A row of an answer is no more than a whole step: where prompts seem as good as free, the fit says little.
        """
        is_decode = [not chunk.sequence.is_prefilling for chunk in chunks]
        row, position = 1.0, 0.0
        if any(is_decode) and costs.token_s:
            row = (costs.step_s / sum(is_decode) + costs.decode_s) / costs.token_s
            position = costs.context_s / costs.token_s
        return [
            min(row + position * chunk.span.start, self.max_step_tokens) if decodes else self.token_cost.of(chunk.span)
            for chunk, decodes in zip(chunks, is_decode, strict=True)
        ]

    def _level(self, sequence: Sequence) -> int:
        """How much its client has had lately, in doublings: 0 is less than a step, 3 is 7 to 15 steps. A client beyond
        its share has had more than any other."""
        return int(math.log2(1 + sequence.client_work / self.max_step_tokens)) + sequence.is_over_share

    def _beside(self, decodes: list[ScheduledChunk[Sequence]], cost: float) -> StepBudget:
        """Budget that the decodes leave to prompts of a step that may cost so much."""
        left = cost - sum(self.token_cost.of(chunk.span) for chunk in decodes)
        num_rows = sum(chunk.span.end - chunk.span.start for chunk in decodes)
        return StepBudget(self.token_cost, self.max_step_tokens - num_rows, max(left, LEAST_SHARE * cost))

    def within(self, gap_s: float, beside: StepShape, depth: int, costs: StepCosts) -> StepBudget:
        """Budget of prompts, in seconds, beside decodes in a step that keeps a gap: at least a block at `depth`."""
        token_cost = TokenCost.in_seconds(costs)
        left_s = costs.longest_s(gap_s) - costs.decode_part_s(beside) - costs.chunk_s
        block_s = token_cost.of(ChunkSpan(depth, depth + self.block_size))
        num_rows = beside.num_decoding + beside.num_drafts
        return StepBudget(token_cost, self.max_step_tokens - num_rows, max(left_s, block_s))

    def _filled(self, budget: StepBudget, depth: int) -> StepBudget:
        """The budget of a whole pass: that to which the tokens from `depth` on that fit in this budget are padded.

        On an H100 (granite-h-micro, beside 35 decodes) 100 tokens more within a pass's rows took less than 0.2 ms, 1 by
        the fit to passes of all sizes. It follows what full passes take.
        """
        fitting = budget.fitting(depth)
        rows = next((rows for rows in self.pass_rows if rows >= fitting), None)
        if rows is None:
            return budget
        num_tokens = min(rows, budget.num_tokens)
        cost = budget.token_cost.of(ChunkSpan(depth, depth + num_tokens))
        return StepBudget(budget.token_cost, num_tokens, max(budget.cost, cost))

    def _chunks(self, prefilling: list[Sequence], budget: StepBudget) -> list[ScheduledChunk[Sequence]]:
        """Chunks in this order, as long as the budget lasts."""
        chunks: list[ScheduledChunk[Sequence]] = []
        for sequence in prefilling:
            span = self._span(sequence, budget.fitting(sequence.num_computed))
            if span is None:
                break
            chunks.append(ScheduledChunk(sequence, span))
            budget = budget.without(span)
        return chunks

    def _span(self, sequence: Sequence, num_tokens: int) -> ChunkSpan | None:
        """The next span, ending on a block boundary unless it ends the prefill or fills no block."""
        start, last = sequence.num_computed, sequence.prefill_length
        end = min(last, start + num_tokens)
        if end < last and end // self.block_size * self.block_size > start:
            end = end // self.block_size * self.block_size
        return ChunkSpan(start, end) if end > start else None


def _newest(sequence: Sequence) -> ScheduledChunk[Sequence]:
    """The newest token of a decoding sequence, and its drafts; behind a check, as if that accepted no draft."""
    start, behind, slack = sequence.num_computed, sequence.behind, 0
    if behind is not None:
        start, slack = start + 1, behind.num_drafts
    drafts, num_drafts = sequence.drafts, len(sequence.drafts)
    span = ChunkSpan(start, start + 1 + num_drafts)
    return ScheduledChunk(sequence, span, drafts=drafts, num_drafts=num_drafts, slack=slack)


def smallest_gap_s(decoding: Iterable[Sequence]) -> float | None:
    """Returns the smallest gap that a request of these sequences names; None: none does."""
    return min((s.token_gap_s for s in decoding if s.token_gap_s is not None), default=None)


def after_turn(running: Iterable[Sequence], chunks: Iterable[ScheduledChunk[Sequence]]) -> list[Sequence]:
    """`running` for the next call of `schedule`: the sequences of this step move to the end, in the order they had."""
    ran = {chunk.sequence for chunk in chunks}
    return sorted(running, key=ran.__contains__)


class VictimPolicy(Protocol):
    """Chooses the running request to preempt when one needs a block and none is available."""

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """One of `running`, which includes the request that needs the block."""
        ...


class LatestArrival:
    """Preempts the request that arrived last: it has the least to lose.

    The oldest request is never preempted for another: it ends, so the next oldest ends, and so do they all.
    """

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=lambda sequence: sequence.arrival)
