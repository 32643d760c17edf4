"""Drafts by the model's MTP layer: which sequences get how many, by the blocks and the memory that are left."""

from __future__ import annotations

import logging

import torch

from headrace.cache.prefix_cache import PrefixCache
from headrace.engine.draft_passes import DraftStart
from headrace.engine.failures import first_line
from headrace.engine.runner import ModelRunner
from headrace.engine.sequence import Sequence

log = logging.getLogger(__name__)


class MtpDrafts:
    """The `LayerDrafts` of an engine around a model with its MTP layer."""

    def __init__(self, runner: ModelRunner, cache: PrefixCache) -> None:
        self._runner = runner
        self._cache = cache

    def drafts(self, wanted: list[tuple[Sequence, int]], num_running: int) -> list[list[int]]:
        """As `LayerDrafts.drafts`: none for want of memory on the device, fewer for want of blocks."""
        starts = [self._start(sequence, num_drafts, num_running) for sequence, num_drafts in wanted]
        drafting = [start for start in starts if start.num_drafts > 0]
        try:
            made = iter(self._runner.draft_tokens(drafting) if drafting else ())
        except (torch.OutOfMemoryError, MemoryError) as error:
            log.warning("a step goes without drafts: %s", first_line(error))
            return [[] for _ in wanted]
        return [next(made) if start.num_drafts > 0 else [] for start in starts]

    def _start(self, sequence: Sequence, num_drafts: int, num_running: int) -> DraftStart:
        claim, position = sequence.held, sequence.num_computed
        if not self._cache.extend(claim, position + num_drafts, min_blocks_left=num_running):
            num_drafts = len(claim.block_ids) * self._cache.block_size - position
        return DraftStart(sequence.tokens[position], position, claim.block_ids, sequence.state_slot, num_drafts)
