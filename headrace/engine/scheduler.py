"""Scheduling: which sequences run in the next step, how many tokens of each, and which one is preempted.

Pure: no tensors, no clock. Decoding sequences go first (one token each): a long prompt delays no other request's next
token by more than one chunk. Prefills share what is left of the token budget, B. Prompts with less than half as many
tokens left as the one that arrived first get up to half of it, those with the fewest first; it gets the rest, and what
it leaves goes by arrival. So a short prompt does not wait for a long one, and prompts of one length are computed one
after another. None starves: whatever comes later, a prompt is done within 2 T/B steps, where T are its tokens and those
of the prompts that arrived before it (and a step for each of these, as chunks end on block boundaries). When there are
more sequences than a step takes, they take turns: all decoding ones, and the prefill that arrived first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.publishing import ScheduledChunk
from headrace.engine.sequence import Sequence


@dataclass(frozen=True)
class Scheduler:
    """Chooses the chunks of a step.

    max_step_tokens   token budget of a step
    max_running       the most sequences in a step
    """

    max_step_tokens: int
    max_running: int
    block_size: int

    def schedule(self, running: Iterable[Sequence]) -> list[ScheduledChunk[Sequence]]:
        """The next step's chunks. `running`: longest wait for a step first. Never empty unless `running` is."""
        ready = list(running)
        prefilling = sorted((s for s in ready if s.is_prefilling), key=lambda s: s.arrival)
        head = prefilling[0] if prefilling else None
        turns = [s for s in ready if s is head or not s.is_prefilling][: self.max_running]
        chunks = [ScheduledChunk(s, ChunkSpan(s.num_computed, s.num_computed + 1)) for s in turns if s is not head]
        if head in turns:
            chunks += self._prefills(prefilling, self.max_running - len(chunks), self.max_step_tokens - len(chunks))
        return chunks

    def _prefills(self, prefilling: list[Sequence], places: int, budget: int) -> list[ScheduledChunk[Sequence]]:
        """Chunks of prompts, at least one, within places and budget. `prefilling`: by arrival."""
        first = prefilling[0]
        shorter = sorted((s for s in prefilling if 2 * _left(s) < _left(first)), key=_left)
        chunks = self._chunks(shorter[: places - 1], budget // 2)
        taken = {chunk.sequence for chunk in chunks}
        others = [sequence for sequence in prefilling if sequence not in taken]
        return chunks + self._chunks(others[: places - len(chunks)], budget - _num_tokens(chunks))

    def _chunks(self, prefilling: list[Sequence], budget: int) -> list[ScheduledChunk[Sequence]]:
        """Chunks in this order, as long as the budget lasts."""
        chunks: list[ScheduledChunk[Sequence]] = []
        for sequence in prefilling:
            span = self._span(sequence, budget - _num_tokens(chunks))
            if span is None:
                break
            chunks.append(ScheduledChunk(sequence, span))
        return chunks

    def _span(self, sequence: Sequence, budget: int) -> ChunkSpan | None:
        """The next span, ending on a block boundary unless it ends the prefill or fills no block."""
        start, last = sequence.num_computed, sequence.prefill_length
        end = min(last, start + budget)
        if end < last and end // self.block_size * self.block_size > start:
            end = end // self.block_size * self.block_size
        return ChunkSpan(start, end) if end > start else None


def _left(sequence: Sequence) -> int:
    return sequence.prefill_length - sequence.num_computed


def _num_tokens(chunks: Iterable[ScheduledChunk[Sequence]]) -> int:
    return sum(chunk.span.end - chunk.span.start for chunk in chunks)


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
