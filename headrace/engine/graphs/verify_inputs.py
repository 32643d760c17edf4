"""Inputs of a captured pass that verifies drafts: tensors at fixed addresses, filled for each step by one kernel.

Every sequence has T rows: its newest token, its drafts, and padding, which sees nothing and writes to the scratch block
alone. The kernels of decodes run on them: a sequence's context and state are read once for all its rows. Where layers
keep no tails, a state is written behind each row to a slot of its own. Places are found at the head of the pass: the
device alone may know how many drafts the check before has accepted (headrace/kernels/sampling/checked_rows.py).

Legend    B sequences, n of them real and the others padding; T rows of each; M blocks a sequence at most
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from itertools import chain

import numpy as np
import torch

from headrace.cache.tails import BehindCheck, Tail
from headrace.engine.graphs.decode_inputs import PAD_SLOT, HostTable, round_up
from headrace.forward.forward_batch import DecodeGroup, DecodeRows, ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.paged_attention import PagedDecode
from headrace.kernels.lib.segments import StateSource
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.tails import Tails
from headrace.kernels.lib.unpack import unpack
from headrace.kernels.lib.upload import PinnedBuffers
from headrace.kernels.sampling.checked_rows import CheckField, CheckSources, place_checked_rows

NOT_BEHIND = BehindCheck(row=PAD_SLOT, num_drafts=0, base=None, slot=PAD_SLOT)
PADDING = np.full(len(CheckField), PAD_SLOT, dtype=np.int32)
PADDING[[CheckField.LENGTH, CheckField.START, CheckField.BASE]] = 0


class RowField(IntEnum):
    """The numbers that describe a row."""

    TOKEN = 0
    DST = 1
    LOGITS = 2  # the row whose logits are first, second and so on
    FUTURE = 3  # which of the layer's drafts its token is, or -1: TOKEN has it


class VerifyInputs:
    """Sequences of one token each, with up to T - 1 drafts behind it; their number is padded to a captured size."""

    def __init__(self, memory: CacheMemory, sources: CheckSources, max_sequences: int, rows_each: int, max_tokens: int):
        """No sequence is longer than `max_tokens`."""
        self._sources = sources
        self.rows_each = rows_each
        self._block_size = memory.layout.block_size
        self._sizes = (self._block_size, memory.scratch_block, memory.tail_places)
        # Multiples of sixteen, as in `DecodeInputs`.
        self._max_sequences = round_up(max_sequences, 16)
        self._max_blocks = round_up(cdiv(max_tokens, self._block_size), 16)
        new = partial(torch.zeros, dtype=torch.int32, device=memory.device)
        self._rows = new(len(RowField), self._max_sequences * rows_each)
        self._fields = new(self._max_sequences, len(CheckField))
        self._table = new(self._max_sequences, self._max_blocks)
        self._host_table = HostTable(self._max_sequences, self._max_blocks)
        self._buffers = PinnedBuffers(memory.device, torch.int32)
        self.load((), self._max_sequences * rows_each)  # as in `DecodeInputs`

    def num_rows(self, inputs: Sequence[SequenceInput]) -> int:
        return len(inputs) * self.rows_each

    def fits(self, inputs: Sequence[SequenceInput]) -> bool:
        """True if `load` takes them: single tokens, and drafts behind them."""
        return all(
            (entry.is_decode or entry.has_drafts)
            and len(entry.tokens) <= self.rows_each
            and len(entry.block_ids) <= self._max_blocks
            for entry in inputs
        )

    def load(self, inputs: Sequence[SequenceInput], num_rows: int) -> None:
        """Rows of these steps, and padding up to `num_rows`. Waits for nothing."""
        n, B = len(inputs), num_rows // self.rows_each
        width = cdiv(max((entry.end_at_most for entry in inputs), default=0), self._block_size)
        end_rows = len(RowField) * num_rows
        end_fields = end_rows + len(CheckField) * B
        with self._buffers.next(end_fields + n * width) as packed:
            rows, fields, blocks = np.split(packed.numpy(), (end_rows, end_fields))
            fields = fields.reshape(B, -1)
            if inputs:
                fields[:n] = self._check_fields(inputs)
            fields[n:] = PADDING
            self._fill_rows(rows.reshape(len(RowField), B, self.rows_each), inputs, fields[:n])
            blocks[:] = self._host_table.rows(inputs, width).reshape(-1)
            unpack(packed, self._rows[:, :num_rows], self._fields[:B], self._table[:n, :width])

    def _check_fields(self, inputs: Sequence[SequenceInput]) -> list[tuple[int, ...]]:
        """A row of each, in the order of `CheckField`."""
        rows: list[tuple[int, ...]] = []
        for entry in inputs:
            counted_at, _, next_base, next_src = entry.behind or NOT_BEHIND
            row, base, written = entry.tail or Tail(entry.dst_slot, entry.start, entry.end)
            rows.append(
                (
                    len(entry.tokens),
                    entry.start,
                    PAD_SLOT if entry.future_token is None else entry.future_token,
                    counted_at,
                    PAD_SLOT if entry.src_slot is None else entry.src_slot,
                    base,
                    next_src,
                    PAD_SLOT if next_base is None else next_base,
                    entry.dst_slot,
                    row,
                    PAD_SLOT if written is None else written,
                )
            )
        return rows

    def _fill_rows(self, rows_FBT: np.ndarray, inputs: Sequence[SequenceInput], fields: np.ndarray) -> None:
        n, T = len(inputs), self.rows_each
        lengths = fields[:, CheckField.LENGTH]
        num_logits = np.array([entry.num_logits for entry in inputs], dtype=np.int64)
        future_drafts = [PAD_SLOT if e.future_drafts is None else e.future_drafts for e in inputs]
        future_rows = np.array(future_drafts, dtype=np.int64)
        place = np.arange(T)
        is_real = place < lengths[:, None]
        is_future = is_real & (place > 0) & (future_rows >= 0)[:, None]
        rows_FBT[:] = 0
        rows_FBT[RowField.DST] = rows_FBT[RowField.FUTURE] = PAD_SLOT
        rows_FBT[RowField.FUTURE, :n] = np.where(
            is_future, future_rows[:, None] * self._sources.drafted.shape[1] + place - 1, PAD_SLOT
        )
        rows_FBT[RowField.TOKEN, :n][is_real] = list(chain.from_iterable([entry.tokens for entry in inputs]))
        rows_FBT[RowField.DST, np.arange(n), lengths - 1] = fields[:, CheckField.DST]
        for sequence, entry in enumerate(inputs):
            if entry.emit:
                rows_FBT[RowField.DST, sequence, : len(entry.emit)] = [slot for _, slot in entry.emit]
        wanted = np.flatnonzero(is_real & (place >= (lengths - num_logits)[:, None]))
        rows_FBT[RowField.LOGITS].reshape(-1)[: len(wanted)] = wanted

    def batch(self, num_rows: int) -> ForwardBatch:
        """The loaded step as a batch. Captured with the model's forward pass, so made once for each size."""
        T, B = self.rows_each, num_rows // self.rows_each
        known, dst_slots, logit_rows, future = self._rows[:, :num_rows].long()
        found = place_checked_rows(self._fields[:B], known, future, self._table[:B], self._sources, sizes=self._sizes)
        group = DecodeGroup(
            rows=slice(num_rows),
            source=StateSource(found.sources, any_fresh=True),
            dst_slots=dst_slots.view(B, T),
            tails=Tails(found.tails, rows_each=T),
        )
        return ForwardBatch(
            num_decodes=num_rows,
            decode=DecodeRows((group,), PagedDecode(num_rows, PagedContexts(found.contexts, self._table[:B]))),
            prefill=None,
            tokens_T=found.tokens,
            positions_T=found.positions,
            block_T=found.blocks,
            offset_T=found.offsets,
            logit_rows=logit_rows,
            last_token_queries=None,
        )
