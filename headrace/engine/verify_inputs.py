"""Inputs of a captured pass that verifies drafts: tensors at fixed addresses, filled for each step by one copy.

Every sequence has T rows: its newest token, its drafts, and padding, which sees nothing and writes to the scratch block
alone. The kernels of decodes run on them: a sequence's context and state are read once for all its rows. Where layers
keep no tails, a state is written behind each row to a slot of its own.

Legend    B sequences, n of them real and the others padding; T rows of each; M blocks a sequence at most
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from headrace.engine.decode_inputs import PAD_SLOT, PAD_TAIL, HostTable, round_up
from headrace.forward.forward_batch import DecodeGroup, DecodeRows, ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput, tail_fields, written_slots
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.paged_attention import PagedDecode
from headrace.kernels.lib.segments import StateSource
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.tails import TailField, Tails
from headrace.kernels.sampling.future_tokens import resolve_future_tokens


class RowField(IntEnum):
    """The numbers that describe a row."""

    TOKEN = 0
    POSITION = 1
    CONTEXT = 2  # tokens that the row attends to, itself among them
    BLOCK = 3  # block and offset that its keys and values go to
    OFFSET = 4
    DST = 5
    LOGITS = 6  # the row whose logits are first, second and so on
    FUTURE = 7  # which of the layer's drafts its token is, or -1: TOKEN has it


class VerifyInputs:
    """Sequences of one token each, with up to T - 1 drafts behind it; their number is padded to a captured size."""

    def __init__(self, memory: CacheMemory, drafted: Tensor, max_sequences: int, rows_each: int, max_tokens: int):
        """`drafted` int64 [rows, K]: the layer's last drafts. No sequence is longer than `max_tokens`."""
        self._drafted = drafted
        self._rows_each = rows_each
        self._block_size, self._scratch_block = memory.layout.block_size, memory.scratch_block
        # Multiples of sixteen, as in `DecodeInputs`.
        self._max_sequences = round_up(max_sequences, 16)
        self._max_blocks = round_up(cdiv(max_tokens, self._block_size), 16)
        device = memory.device
        self._rows = torch.zeros(len(RowField), self._max_sequences * rows_each, dtype=torch.int32, device=device)
        self._rows[RowField.BLOCK] = memory.scratch_block
        self._rows[RowField.DST] = self._rows[RowField.FUTURE] = PAD_SLOT
        self._src = torch.full((self._max_sequences,), PAD_SLOT, dtype=torch.int32, device=device)
        self._tail_places = memory.tail_places
        self._tails = torch.tensor(PAD_TAIL, dtype=torch.int32).repeat(self._max_sequences, 1).to(device)
        self._table = torch.zeros(self._max_sequences, self._max_blocks, dtype=torch.int32, device=device)
        self._host_table = HostTable(self._max_sequences, self._max_blocks)

    def num_rows(self, inputs: Sequence[SequenceInput]) -> int:
        return len(inputs) * self._rows_each

    def fits(self, inputs: Sequence[SequenceInput]) -> bool:
        """True if `load` takes them: known newest tokens, and drafts."""
        return all(
            (entry.is_decode or entry.has_drafts)
            and len(entry.tokens) <= self._rows_each
            and entry.future_token is None
            and len(entry.block_ids) <= self._max_blocks
            for entry in inputs
        )

    def load(self, inputs: Sequence[SequenceInput], num_rows: int) -> None:
        """Rows of these steps, and padding up to `num_rows`. Waits for nothing."""
        n, B = len(inputs), num_rows // self._rows_each
        width = max(cdiv(entry.end, self._block_size) for entry in inputs)
        table = self._host_table.rows(inputs, width)
        end_rows = len(RowField) * num_rows
        end_src, end_tails = end_rows + B, end_rows + B + len(TailField) * B
        packed = torch.empty(end_tails + n * width, dtype=torch.int32, pin_memory=self._rows.is_cuda)
        rows, src, tails, blocks = np.split(packed.numpy(), (end_rows, end_src, end_tails))
        fields = tail_fields(inputs, self._tail_places)
        self._fill_rows(rows.reshape(len(RowField), B, self._rows_each), inputs, table)
        src[:n] = fields[:, TailField.SRC]
        src[n:] = PAD_SLOT
        tails = tails.reshape(B, -1)
        tails[:n] = fields
        tails[n:] = PAD_TAIL
        blocks[:] = table.reshape(-1)
        arrived = packed.to(self._rows.device, non_blocking=True)
        self._rows[:, :num_rows].copy_(arrived[:end_rows].view(-1, num_rows))
        self._src[:B].copy_(arrived[end_rows:end_src])
        self._tails[:B].copy_(arrived[end_src:end_tails].view(B, -1))
        self._table[:n, :width].copy_(arrived[end_tails:].view(n, width))

    def _fill_rows(self, rows_FBT: np.ndarray, inputs: Sequence[SequenceInput], table: np.ndarray) -> None:
        n, T = len(inputs), self._rows_each
        numbers = [(len(entry.tokens), entry.start, entry.num_logits, _or_pad(entry.future_drafts)) for entry in inputs]
        lengths, starts, num_logits, future_rows = np.array(numbers).T
        place = np.arange(T)
        is_real = place < lengths[:, None]
        positions = np.where(is_real, starts[:, None] + place, 0)
        blocks = np.take_along_axis(table, positions // self._block_size, axis=1)
        rows_FBT[:] = 0
        rows_FBT[RowField.BLOCK, n:], rows_FBT[RowField.DST] = self._scratch_block, PAD_SLOT
        is_future = is_real & (place > 0) & (future_rows >= 0)[:, None]
        rows_FBT[RowField.FUTURE] = PAD_SLOT
        rows_FBT[RowField.FUTURE, :n] = np.where(
            is_future, future_rows[:, None] * self._drafted.shape[1] + place - 1, PAD_SLOT
        )
        rows_FBT[RowField.TOKEN, :n][is_real] = [token for entry in inputs for token in entry.tokens]
        rows_FBT[RowField.POSITION, :n] = positions
        rows_FBT[RowField.CONTEXT, :n] = np.where(is_real, positions + 1, 0)
        rows_FBT[RowField.BLOCK, :n] = np.where(is_real, blocks, self._scratch_block)
        rows_FBT[RowField.OFFSET, :n] = positions % self._block_size
        rows_FBT[RowField.DST, :n][is_real] = [slot for entry in inputs for slot in written_slots(entry)]
        wanted = np.flatnonzero(is_real & (place >= (lengths - num_logits)[:, None]))
        rows_FBT[RowField.LOGITS].reshape(-1)[: len(wanted)] = wanted

    def batch(self, num_rows: int) -> ForwardBatch:
        """The loaded step as a batch. Captured with the model's forward pass, so made once for each size."""
        T, B = self._rows_each, num_rows // self._rows_each
        rows = self._rows.long()
        row = [rows[field, :num_rows] for field in RowField]
        contexts = PagedContexts(self._rows[RowField.CONTEXT, :num_rows], self._table[:B])
        group = DecodeGroup(
            rows=slice(num_rows),
            source=StateSource(self._src.long()[:B], any_fresh=True),
            dst_slots=row[RowField.DST].view(B, T),
            tails=Tails(self._tails[:B], rows_each=T),
        )
        return ForwardBatch(
            num_decodes=num_rows,
            decode=DecodeRows((group,), PagedDecode(num_rows, contexts)),
            prefill=None,
            tokens_T=resolve_future_tokens(row[RowField.TOKEN], row[RowField.FUTURE], self._drafted.view(-1)),
            positions_T=row[RowField.POSITION],
            block_T=row[RowField.BLOCK],
            offset_T=row[RowField.OFFSET],
            logit_rows=row[RowField.LOGITS],
            last_token_queries=None,
        )


def _or_pad(row: int | None) -> int:
    return PAD_SLOT if row is None else row
