"""Passes of a model's MTP layer over all drafting sequences: one for each draft position, captured or launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.engine.drafts.ahead import CheckedSequence, CheckedStarts, DraftsAhead
from headrace.engine.graphs.captured_passes import Capture, Captured
from headrace.engine.graphs.decode_inputs import PAD_SLOT, HasBlocks, HostTable, round_up
from headrace.forward.forward_batch import DecodeRows, ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.paged_attention import PagedDecode
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.unpack import unpack
from headrace.kernels.lib.upload import PinnedBuffers, upload_values
from headrace.kernels.sampling.checked_rows import CheckSources
from headrace.kernels.sampling.draft_rows import next_draft_rows
from headrace.kernels.sampling.draft_starts import DraftStarts
from headrace.models.model import HybridModel


@dataclass(frozen=True)
class DraftStart:
    """The place where the drafts of one sequence begin.

    token        its newest, which no step has computed
    position     of that token, at least 1
    block_ids    covering position + num_drafts tokens or more
    vector       where the hidden vector before the token lies, see `HybridModel.last_hidden`
    """

    token: int
    position: int
    block_ids: Sequence[int]
    vector: int
    num_drafts: int


@torch.inference_mode()
def draft_tokens(model: HybridModel, memory: CacheMemory, starts: Sequence[DraftStart]) -> list[list[int]]:
    """The layer's best tokens after each start: the layer's entries in the blocks advance, and states stay. Waits.

    What the passes write lies behind the computed tokens: the step that checks the drafts writes it again.
    """
    order = sorted(range(len(starts)), key=lambda place: -starts[place].num_drafts)
    rows = [starts[place] for place in order]  # each pass takes the first of these
    hidden = model.last_hidden(memory, upload_values([row.vector for row in rows], memory.device))
    drawn: list[Tensor] = []
    for ahead in range(rows[0].num_drafts):
        going_on = [row for row in rows if row.num_drafts > ahead]
        inputs = [
            SequenceInput(
                tokens=(row.token,),
                start=row.position + ahead,
                block_ids=row.block_ids,
                src_slot=number,  # of states that the layer does not have
                dst_slot=number,
                future_token=number if ahead else None,
            )
            for number, row in enumerate(going_on)
        ]
        batch = ForwardBatch.build(inputs, memory.layout.block_size, memory.device, drawn[-1] if drawn else None)
        hidden = model.draft_hidden(batch, memory, hidden[: len(going_on)])
        drawn.append(torch.empty(len(hidden), dtype=torch.int64, device=memory.device))
        model.best_drafts(hidden, drawn[-1])
    ids = iter(torch.cat(drawn).tolist())
    drafts: list[list[int]] = [[] for _ in starts]
    for part in drawn:
        for place in order[: len(part)]:
            drafts[place].append(next(ids))
    return drafts


class CapturedDrafts:
    """`draft_tokens` by a captured pass for each draft position of each of a few numbers of sequences, or for all
    positions behind a check.

    A pass reads a token, position and vector of each row, and leaves its draft where the next position's reads it,
    with the position and vector that it begins with. Rows behind their last draft, and padding, see nothing and write
    to the scratch block.

    Legend    B rows, M blocks a row at most
    """

    def __init__(
        self,
        model: HybridModel,
        memory: CacheMemory,
        sources: CheckSources,
        sizes: Sequence[int],
        max_tokens: int,
        capture: Capture,
    ) -> None:
        """No sequence is longer than `max_tokens`, its drafts included. The passes leave their drafts in
        `sources.drafted`."""
        self._model, self._memory = model, memory
        self._drafted, self._checked = sources.drafted, CheckedStarts(sources, memory)
        self.sizes = sorted(sizes)
        most, self._block_size = round_up(self.sizes[-1], 16), memory.layout.block_size
        self._max_blocks = round_up(cdiv(max_tokens, self._block_size), 16)
        device = memory.device
        self._rows = torch.zeros(len(DraftStarts._fields), most, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(most, model.config.hidden_size, dtype=model.dtype, device=device)
        self._table = torch.zeros(most, self._max_blocks, dtype=torch.int32, device=device)
        self._host_table = HostTable(most, self._max_blocks)
        self._buffers = PinnedBuffers(device, torch.int64)
        self._load((), most)  # captures run on padding, and this compiles the kernels of `_load` and `draft_ahead`
        self._passes: dict[int, list[Captured]] = {}
        self._beginnings: dict[int, Captured] = {}
        self._whole: dict[int, Captured] = {}
        for size in reversed(self.sizes):  # the largest first, as in `CapturedPasses`
            self._passes[size] = [capture(partial(self._pass, size, place)) for place in range(self._drafted.shape[1])]
            self._beginnings[size] = capture(partial(self._begin, size))
            self._whole[size] = capture(partial(self._begin_and_pass, size))

    def fits(self, starts: Sequence[DraftStart]) -> bool:
        return len(starts) <= self.sizes[-1] and all(
            start.position + start.num_drafts <= self._max_blocks * self._block_size
            and start.num_drafts <= self._drafted.shape[1]
            and len(start.block_ids) <= self._max_blocks
            for start in starts
        )

    @torch.inference_mode()
    def draft_tokens(self, starts: Sequence[DraftStart]) -> list[list[int]]:
        """As the function of this name; `fits` holds."""
        size = next(size for size in self.sizes if size >= len(starts))
        self._load(starts, size)
        ids = self._run(size, len(starts), max(start.num_drafts for start in starts)).tolist()
        return [each[: start.num_drafts] for each, start in zip(ids, starts, strict=True)]

    def takes(self, starts: Sequence[CheckedSequence], num_passes: int) -> bool:
        """True if `draft_ahead` can take these sequences with so many passes."""
        most_drafts, max_blocks = self._drafted.shape[1], self._max_blocks
        return (
            len(starts) <= self.sizes[-1]
            and num_passes <= most_drafts
            and all(len(each.tokens) <= most_drafts + 1 and len(each.block_ids) <= max_blocks for each, *_ in starts)
        )

    @torch.inference_mode()
    def draft_ahead(self, starts: Sequence[CheckedSequence], num_passes: int) -> DraftsAhead:
        """Has the layer draft behind the step that was just launched, whatever that draws. Waits for nothing."""
        n, size = len(starts), next(size for size in self.sizes if size >= len(starts))
        rows = self._checked.packed(starts, size, num_passes)
        # Tokens that passes may reach: if all drafts so far are accepted, and so many are made behind them.
        farthest = max(min(covered, entry.end_at_most + num_passes) for entry, _, covered in starts)
        width = cdiv(farthest, self._block_size)
        self._unpack(rows, starts, width, self._checked.fields(size))
        if num_passes == self._drafted.shape[1]:
            self._whole[size].replay()
            return DraftsAhead(self._drafted[:n], starts)
        self._beginnings[size].replay()
        return DraftsAhead(self._run(size, n, num_passes), starts)

    def _run(self, size: int, num_rows: int, num_passes: int) -> Tensor:
        """The drafts [num_rows, num_passes] of what is loaded."""
        for each in self._passes[size][:num_passes]:
            each.replay()
        return self._drafted[:num_rows, :num_passes]

    def _begin(self, size: int) -> Tensor:
        """Loads the rows that the checked sequences begin with; returns their tokens."""
        starts = self._starts(size)
        self._checked.find(starts)
        self._model.last_hidden(self._memory, starts.vectors, self._hidden[:size])
        return starts.tokens

    def _starts(self, size: int) -> DraftStarts:
        """The inputs of the first pass; its positions become those of the next one."""
        return DraftStarts(*self._rows[:, :size])

    def _load(self, starts: Sequence[DraftStart], size: int) -> None:
        n = len(starts)
        ends = [start.position + start.num_drafts for start in starts]
        width = cdiv(max(ends, default=0), self._block_size)
        rows = np.zeros((4, size), np.int64)
        rows[:, :n] = [[s.token for s in starts], [s.position for s in starts], ends, [s.vector for s in starts]]
        rows[3, n:] = PAD_SLOT
        self._unpack(rows, starts, width, self._rows[:, :size])
        self._model.last_hidden(self._memory, self._starts(size).vectors, self._hidden[:size])

    def _unpack(self, rows: np.ndarray, starts: Sequence[HasBlocks], width: int, destination: Tensor) -> None:
        """Loads `rows` to `destination`, and the first `width` block ids of each start to the table."""
        n = len(starts)
        with self._buffers.next(rows.size + n * width) as packed:
            numbers = packed.numpy()
            numbers[: rows.size] = rows.reshape(-1)
            numbers[rows.size :] = self._host_table.rows(starts, width).reshape(-1)
            unpack(packed, destination, self._table[:n, :width])

    def _begin_and_pass(self, size: int) -> Tensor:
        """All drafts of the checked sequences; returns the last ones. One graph, as each begins 8 us after another."""
        self._begin(size)
        hidden = self._hidden[:size]
        for place in range(self._drafted.shape[1]):
            hidden = self._draft(size, place, hidden)
        return self._drafted[:size, -1]

    def _pass(self, size: int, place: int) -> Tensor:
        """Makes each row's draft at `place`, the first one being at 0; returns these drafts."""
        self._hidden[:size].copy_(self._draft(size, place, self._hidden[:size]))
        return self._drafted[:size, place]

    def _draft(self, size: int, place: int, previous: Tensor) -> Tensor:
        """Writes each row's draft at `place`, the first one being at 0. Returns the layer's hidden vectors, from which
        the drafts at the next place are made."""
        tokens, next_positions, ends, _ = self._starts(size)
        if place:
            tokens = self._drafted[:size, place - 1]
        table, scratch_block = self._table[:size], self._memory.scratch_block
        rows = next_draft_rows(next_positions, ends, table, sizes=(self._block_size, scratch_block))
        attention = PagedDecode(size, PagedContexts(rows.contexts, table))
        batch = ForwardBatch(
            num_decodes=size,
            decode=DecodeRows((), attention),  # of groups, none: the layer has no states
            prefill=None,
            tokens_T=tokens,
            positions_T=rows.positions,
            block_T=rows.blocks,
            offset_T=rows.offsets,
            logit_rows=None,
            last_token_queries=None,
        )
        hidden = self._model.draft_hidden(batch, self._memory, previous)
        self._model.best_drafts(hidden, self._drafted[:size, place])
        return hidden
