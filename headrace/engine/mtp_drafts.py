"""Drafts by the model's MTP layer: a small pass over all drafting sequences for each draft position."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.prefix_cache import PrefixCache
from headrace.engine.failures import first_line
from headrace.engine.sequence import Sequence
from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.lib.upload import upload_values
from headrace.models.model import HybridModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftStart:
    """The place where the drafts of one sequence begin.

    token        its newest, which no step has computed
    position     of that token, at least 1
    block_ids    covering position + num_drafts tokens or more
    slot         the state before the token
    """

    token: int
    position: int
    block_ids: SequenceOf[int]
    slot: int
    num_drafts: int


@torch.inference_mode()
def draft_tokens(model: HybridModel, memory: CacheMemory, starts: SequenceOf[DraftStart]) -> list[list[int]]:
    """The layer's best tokens after each start: the layer's entries in the blocks advance, and states stay. Waits.

    What the passes write lies behind the computed tokens: the step that checks the drafts writes it again.
    """
    order = sorted(range(len(starts)), key=lambda place: -starts[place].num_drafts)
    rows = [starts[place] for place in order]  # each pass takes the first of these
    hidden = model.last_hidden(memory, upload_values([row.slot for row in rows], memory.device))
    drawn: list[Tensor] = []
    for ahead in range(rows[0].num_drafts):
        going_on = [row for row in rows if row.num_drafts > ahead]
        inputs = [
            SequenceInput(
                tokens=(row.token,),
                start=row.position + ahead,
                block_ids=row.block_ids,
                src_slot=row.slot,
                dst_slot=row.slot,
                future_token=number if ahead else None,
            )
            for number, row in enumerate(going_on)
        ]
        batch = ForwardBatch.build(inputs, memory.layout.block_size, memory.device, drawn[-1] if drawn else None)
        hidden = model.draft_hidden(batch, memory, hidden[: len(going_on)])
        drawn.append(model.logits(hidden).argmax(dim=-1))
    ids = iter(torch.cat(drawn).tolist())
    drafts: list[list[int]] = [[] for _ in starts]
    for part in drawn:
        for place in order[: len(part)]:
            drafts[place].append(next(ids))
    return drafts


class MtpDrafts:
    """The `LayerDrafts` of an engine around a model with its MTP layer."""

    def __init__(self, model: HybridModel, memory: CacheMemory, cache: PrefixCache) -> None:
        self._model = model
        self._memory = memory
        self._cache = cache

    def drafts(self, wanted: list[tuple[Sequence, int]], num_running: int) -> list[list[int]]:
        """As `LayerDrafts.drafts`: none for want of memory on the device, fewer for want of blocks."""
        starts = [self._start(sequence, num_drafts, num_running) for sequence, num_drafts in wanted]
        drafting = [start for start in starts if start.num_drafts > 0]
        try:
            made = iter(draft_tokens(self._model, self._memory, drafting) if drafting else ())
        except (torch.OutOfMemoryError, MemoryError) as error:
            log.warning("a step goes without drafts: %s", first_line(error))
            return [[] for _ in wanted]
        return [next(made) if start.num_drafts > 0 else [] for start in starts]

    def _start(self, sequence: Sequence, num_drafts: int, num_running: int) -> DraftStart:
        claim, position = sequence.held, sequence.num_computed
        if not self._cache.extend(claim, position + num_drafts, min_blocks_left=num_running):
            num_drafts = len(claim.block_ids) * self._cache.block_size - position
        return DraftStart(sequence.tokens[position], position, claim.block_ids, sequence.state_slot, num_drafts)
