"""The work of an engine as it reports it with every heartbeat. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.cache.publishing import ScheduledChunk
from headrace.engine.sequence import Sequence
from headrace.step_costs import StepShape


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Sequences that generate, and tokens that are to be computed before others can.

    num_decoding      sequences that generate, or whose state arrives for that
    context_tokens    tokens of their contexts
    waiting_tokens    tokens of prompts that are to be computed: of those that wait, and the rest of the running ones
    waiting_depths    the positions of these tokens, summed
    waiting_lengths   at k: the waiting tokens of prompts that have 2**k up to 2**(k + 1) - 1 left
    """

    num_decoding: int
    context_tokens: int
    waiting_tokens: int
    waiting_depths: int
    waiting_lengths: tuple[int, ...]

    @classmethod
    def of(cls, running: Iterable[Sequence], receiving: Iterable[Sequence], waiting: Iterable[Sequence]) -> EngineLoad:
        """Adds up sequences by where they are in the engine. Paused ones generate nothing."""
        prompts = [_expected(sequence) for sequence in waiting]
        contexts = []
        for sequence in receiving:
            if sequence.num_expected:
                prompts.append(_expected(sequence))
            else:
                contexts.append(len(sequence.tokens))
        for sequence in running:
            if sequence.is_prefilling:
                prompts.append((sequence.num_computed, sequence.prefill_length))
            elif not sequence.is_paused:
                contexts.append(len(sequence.tokens))
        lengths = [0] * max(((end - start).bit_length() for start, end in prompts), default=0)
        depths = 0
        for start, end in prompts:
            if end > start:
                lengths[(end - start).bit_length() - 1] += end - start
                depths += StepShape.prefill(start, end).prefill_depths
        return cls(len(contexts), sum(contexts), sum(lengths), depths, tuple(lengths))


def _expected(sequence: Sequence) -> tuple[int, int]:
    return sequence.prefill_length - sequence.num_expected, sequence.prefill_length


def step_shape(chunks: Iterable[ScheduledChunk[Sequence]]) -> StepShape:
    """The contents of a step of these chunks; call before they are counted as computed."""
    num_decoding = context_tokens = prefill_tokens = prefill_depths = num_drafts = 0
    for chunk in chunks:
        start, end = chunk.span.start, chunk.span.end
        if chunk.sequence.is_prefilling:
            prefill_tokens += end - start
            prefill_depths += (end * (end - 1) - start * (start - 1)) // 2
        else:
            num_decoding += 1
            context_tokens += start + 1
            # Where its place is not known yet, it has room for a draft, as all sequences of a check have.
            num_drafts += (end - start - 1) or bool(chunk.slack)
    return StepShape(num_decoding, context_tokens, prefill_tokens, prefill_depths, num_drafts)
