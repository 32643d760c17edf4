"""Drafts by the model's MTP layer: which sequences get how many, by the blocks and the memory that are left."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from headrace.cache.prefix_cache import PrefixCache
from headrace.engine.drafts.ahead import CheckedSequence, DraftsAhead, FutureDrafts
from headrace.engine.drafts.passes import DraftStart
from headrace.engine.failures import first_line
from headrace.engine.runner import ModelRunner
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.sequence import Sequence
from headrace.forward.sequence_input import SequenceInput
from headrace.speculation.draft_vocabulary import DraftVocabulary

log = logging.getLogger(__name__)


CHANGED_ROWS, CHANGING_CALLS = 2048, 16
"""Rows of the head that change at once, and calls after which they do for tokens of answers."""


class MtpDrafts:
    """The `LayerDrafts` of an engine around a model with its MTP layer."""

    def __init__(self, runner: ModelRunner, cache: PrefixCache, rules: StopRules) -> None:
        self._runner = runner
        self._cache = cache
        self._rules = rules
        self._ahead: DraftsAhead | None = None
        self._row_of: dict[Sequence, int] = {}  # of those whose drafts are made ahead
        head, config = runner.model.draft_head, runner.model.config
        self._vocabulary: DraftVocabulary | None = None  # None: the head has a row for each token
        if head is not None and head.ids is not None:
            self._vocabulary = DraftVocabulary(config.vocab_size, len(head.ids))
        ends = [token for token in config.eos_token_ids if token < config.vocab_size]
        # Tokens since the head changed; at first those that end answers, which often have the highest ids.
        self._occurred = [np.array(ends, dtype=np.int64)]
        self._num_calls = 0

    def drafts(self, wanted: Mapping[Sequence, int], num_running: int) -> list[SequenceOf[int]]:
        """As `LayerDrafts.drafts`: none for want of memory on the device, fewer for want of blocks."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return [self._made_ahead(ahead, sequence, most) for sequence, most in wanted.items()]
        return [*self._made_now(wanted, num_running)]

    @property
    def rows_ahead(self) -> Mapping[Sequence, int]:
        """As `LayerDrafts.rows_ahead`."""
        return {} if self._ahead is None else self._row_of

    def draft_ahead(
        self,
        step: SequenceOf[tuple[Sequence, SequenceInput]],
        first_draws: Mapping[Sequence, int],
        num_passes: int,
        num_running: int,
    ) -> DraftsAhead | None:
        """As `LayerDrafts.draft_ahead`: no further than there are blocks."""
        self._ahead, self._row_of = None, {}
        if not num_passes or not self._runner.can_draft_ahead:
            return None
        starts: list[CheckedSequence] = []
        for sequence, entry in step:
            if entry.is_prompt:
                continue
            claim, last = sequence.held, self._rules.most_tokens(sequence) - 1  # the last token is never computed
            self._cache.extend(claim, min(entry.end_at_most + num_passes, last), min_blocks_left=num_running)
            self._row_of[sequence] = len(starts)
            num_covered = len(claim.block_ids) * self._cache.block_size
            starts.append(CheckedSequence(entry, first_draws[sequence], num_covered))
        if not starts:
            return None
        try:
            self._change_head(self._row_of)
            self._ahead = self._runner.draft_ahead(starts, num_passes)
        except (torch.OutOfMemoryError, MemoryError) as error:
            log.warning("nothing is drafted ahead: %s", first_line(error))
        return self._ahead

    def took(self, sequence: Sequence) -> None:
        """As `LayerDrafts.took`. Before its first draft nothing is noted: that notes all."""
        if self._vocabulary is not None and sequence.num_noted:
            self._note(sequence)

    def _note(self, sequence: Sequence) -> None:
        self._occurred.append(np.asarray(sequence.tokens[sequence.num_noted :]))
        sequence.num_noted = len(sequence.tokens)

    def _change_head(self, sequences: Iterable[Sequence]) -> None:
        """Gives rows of the head to tokens that have occurred: to those of a prompt before its first draft, to those of
        answers now and then."""
        if self._vocabulary is None:
            return
        self._num_calls += 1
        new = [sequence for sequence in sequences if not sequence.num_noted]
        if not new and self._num_calls % CHANGING_CALLS:
            return
        for sequence in new:
            self._note(sequence)
        if self._occurred:  # at once: 64 answers leave 1,024 pieces, which one by one take milliseconds
            self._vocabulary.add(np.concatenate(self._occurred))
            self._occurred = []
        rows, tokens = self._vocabulary.changes(CHANGED_ROWS)
        if len(rows):
            self._runner.change_draft_head(rows.tolist(), tokens.tolist())
            self._vocabulary.made(rows, tokens)

    def _made_ahead(self, ahead: DraftsAhead, sequence: Sequence, num_drafts: int) -> SequenceOf[int]:
        row = self._row_of.get(sequence)
        if row is None:
            return ()
        farthest = sequence.num_computed + sequence.num_pending
        return FutureDrafts(ahead, row, max(0, min(num_drafts, ahead.num_passes, ahead.num_covered[row] - farthest)))

    def _made_now(self, wanted: Mapping[Sequence, int], num_running: int) -> list[list[int]]:
        starts = [self._start(sequence, num_drafts, num_running) for sequence, num_drafts in wanted.items()]
        drafting = [start for start in starts if start.num_drafts > 0]
        try:
            self._change_head(wanted)
            made = iter(self._runner.draft_tokens(drafting) if drafting else ())
        except (torch.OutOfMemoryError, MemoryError) as error:
            log.warning("a step goes without drafts: %s", first_line(error))
            return [[] for _ in wanted]
        return [next(made) if start.num_drafts > 0 else [] for start in starts]

    def _start(self, sequence: Sequence, num_drafts: int, num_running: int) -> DraftStart:
        claim, position = sequence.held, sequence.num_computed
        if not self._cache.extend(claim, position + num_drafts, min_blocks_left=num_running):
            num_drafts = len(claim.block_ids) * self._cache.block_size - position
        tail, vector = sequence.tail, sequence.state_slot
        if tail is not None and position > tail.base:
            vector = self._runner.memory.ring_place(tail.row, position - 1)
        return DraftStart(sequence.tokens[position], position, claim.block_ids, vector, num_drafts)
