"""Prompts in order of arrival, each whole before the next: what a fair scheduler is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.publishing import ScheduledChunk


@dataclass(frozen=True)
class FirstCome:
    """First come, first served, within `max_step_tokens` a step."""

    max_step_tokens: int

    def schedule(self, prefilling: Iterable[Any]) -> list[ScheduledChunk[Any]]:
        """The next step's chunks of prompts."""
        left, chunks = self.max_step_tokens, []
        for sequence in sorted(prefilling, key=lambda each: each.arrival):
            end = min(sequence.num_computed + left, sequence.prefill_length)
            if end > sequence.num_computed:
                chunks.append(ScheduledChunk(sequence, ChunkSpan(sequence.num_computed, end)))
                left -= end - sequence.num_computed
        return chunks
