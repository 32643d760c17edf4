"""Which sequences run in the next step, and how many tokens of each: pure, no tensors, no clock.

Decoding sequences go first (one token each), then prefills share what is left of the token budget, in order
of arrival: a long prompt delays nobody's next token by more than one chunk. When there are more sequences
than a step takes, they take turns: each decoding one, and the prefill at the head of its line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.cache.checkpoints import ChunkSpan
from headrace.engine.sequence import Sequence


@dataclass(frozen=True)
class Planned:
    """One sequence's share of a step: the tokens `span.start` .. `span.end - 1`."""

    sequence: Sequence
    span: ChunkSpan


@dataclass(frozen=True)
class Scheduler:
    """max_step_tokens is the budget of a step, max_running bounds its sequences, in tokens and sequences."""

    max_step_tokens: int
    max_running: int
    block_size: int

    def plan(self, running: Iterable[Sequence]) -> list[Planned]:
        """`running`: first those that have waited longest for a step. Never empty unless `running` is."""
        ready = list(running)
        prefilling = sorted((s for s in ready if s.is_prefilling), key=lambda s: s.arrival)
        head = prefilling[0] if prefilling else None
        turns = [s for s in ready if s is head or not s.is_prefilling][: self.max_running]
        planned = [Planned(s, ChunkSpan(s.num_computed, s.num_computed + 1)) for s in turns if s is not head]
        if head in turns:
            planned += self._chunks(prefilling[: self.max_running - len(planned)], self.max_step_tokens - len(planned))
        return planned

    def _chunks(self, prefilling: list[Sequence], budget: int) -> list[Planned]:
        planned = []
        for sequence in prefilling:
            span = self._chunk(sequence, budget)
            if span is None:
                break
            planned.append(Planned(sequence, span))
            budget -= span.end - span.start
        return planned

    def _chunk(self, sequence: Sequence, budget: int) -> ChunkSpan | None:
        """The next chunk, ending on a block boundary unless it ends the prefill or fills no block."""
        start, last = sequence.num_computed, sequence.prefill_length
        end = min(last, start + budget)
        if end < last and end // self.block_size * self.block_size > start:
            end = end // self.block_size * self.block_size
        return ChunkSpan(start, end) if end > start else None


def after_turn(running: Iterable[Sequence], planned: Iterable[Planned]) -> list[Sequence]:
    """`running` for the next plan: those of this one go to the end, in the order they had."""
    ran = {share.sequence for share in planned}
    return sorted(running, key=ran.__contains__)
