"""Inputs of a captured decode: tensors at fixed addresses, filled for each step by one kernel.

Legend    B rows, n of them sequences and the others padding; M blocks a row at most; m of the longest sequence
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.forward.forward_batch import DecodeGroup, DecodeRows, ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput, tail_fields
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.paged_attention import PagedDecode
from headrace.kernels.lib.segments import StateSource
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.tails import TailField, Tails
from headrace.kernels.lib.unpack import unpack
from headrace.kernels.lib.upload import PinnedBuffers
from headrace.kernels.sampling.future_tokens import resolve_future_tokens

PAD_SLOT = -1  # as a slot: read as zeros, written nowhere
PAD_TAIL = (PAD_SLOT, PAD_SLOT, -1, 0, 0, 0)  # in the order of `TailField`: of no row, read and written nowhere


class DecodeField(IntEnum):
    """The numbers that describe a row."""

    TOKEN = 0
    FUTURE = 1  # index of the token among the draws of the launch before, or -1: TOKEN has it
    POSITION = 2
    CONTEXT = 3  # tokens that the row attends to, itself among them
    BLOCK = 4  # block and offset that its keys and values go to
    OFFSET = 5
    SRC = 6
    DST = 7


class DecodeInputs:
    """Rows are padded to a captured size: a padding row sees nothing and writes to the scratch block alone."""

    def __init__(self, memory: CacheMemory, drawn: Tensor, max_rows: int, max_tokens: int):
        """`drawn` int64 [max_rows or more]: the last launch's tokens. No sequence is longer than `max_tokens`."""
        self._block_size = memory.layout.block_size
        self._drawn = drawn
        # Multiples of sixteen: Triton compiles another kernel for pointers and strides that are not.
        self._max_rows = round_up(max_rows, 16)
        self.max_blocks = round_up(cdiv(max_tokens, self._block_size), 16)
        self._padding = np.zeros(len(DecodeField), dtype=np.int32)
        self._padding[[DecodeField.FUTURE, DecodeField.SRC, DecodeField.DST]] = PAD_SLOT
        self._padding[DecodeField.BLOCK] = memory.scratch_block
        self._tail_places = memory.tail_places
        new = partial(torch.zeros, dtype=torch.int32, device=memory.device)
        self._fields = new(len(DecodeField), self._max_rows)
        self._tails = new(self._max_rows, len(TailField))
        self._table = new(self._max_rows, self.max_blocks)
        self._host_table = HostTable(self._max_rows, self.max_blocks)
        self._buffers = PinnedBuffers(memory.device, torch.int32)
        self.load((), self._max_rows)  # captures run on padding, and this compiles the kernel of `load`

    def num_rows(self, inputs: Sequence[SequenceInput]) -> int:
        return len(inputs)

    def fits(self, inputs: Sequence[SequenceInput]) -> bool:
        """True if `load` takes them: one token and at most one row of logits each, none too long."""
        return all(
            entry.is_decode and entry.num_logits <= 1 and len(entry.block_ids) <= self.max_blocks for entry in inputs
        )

    def load(self, inputs: Sequence[SequenceInput], num_rows: int) -> None:
        """Rows of these steps, one token each, and padding up to `num_rows`. Waits for nothing."""
        n, starts = len(inputs), [entry.start for entry in inputs]
        width = max(starts, default=-1) // self._block_size + 1
        end_fields, end_tails = len(DecodeField) * num_rows, (len(DecodeField) + len(TailField)) * num_rows
        with self._buffers.next(end_tails + n * width) as packed:
            numbers = packed.numpy()
            fields, tails = numbers[:end_fields].reshape(-1, num_rows), numbers[end_fields:end_tails]
            tails, table = tails.reshape(num_rows, -1), numbers[end_tails:].reshape(n, width)
            table[:] = self._host_table.rows(inputs, width)
            self._fill(fields[:, :n], inputs, np.array(starts, dtype=np.int32), table)
            fields[:, n:] = self._padding[:, None]
            tails[:n] = tail_fields(inputs, self._tail_places)
            tails[n:] = PAD_TAIL
            fields[DecodeField.SRC, :n] = tails[:n, TailField.SRC]
            unpack(packed, self._fields[:, :num_rows], self._tails[:num_rows], self._table[:n, :width])

    def batch(self, num_rows: int) -> ForwardBatch:
        """The loaded step as a batch. Captured with the model's forward pass, so made once for each size."""
        fields = resolve_future_tokens(self._fields, self._drawn, token=DecodeField.TOKEN, source=DecodeField.FUTURE)
        row = [fields[field, :num_rows] for field in DecodeField]
        contexts = PagedContexts(self._fields[DecodeField.CONTEXT, :num_rows], self._table[:num_rows])
        group = DecodeGroup(
            rows=slice(num_rows),
            source=StateSource(row[DecodeField.SRC], any_fresh=True),
            dst_slots=row[DecodeField.DST],
            tails=Tails(self._tails[:num_rows], rows_each=1),
        )
        return ForwardBatch(
            num_decodes=num_rows,
            decode=DecodeRows((group,), PagedDecode(num_rows, contexts)),
            prefill=None,
            tokens_T=row[DecodeField.TOKEN],
            positions_T=row[DecodeField.POSITION],
            block_T=row[DecodeField.BLOCK],
            offset_T=row[DecodeField.OFFSET],
            logit_rows=None,
            last_token_queries=None,
        )

    def _fill(self, fields: np.ndarray, inputs: Sequence[SequenceInput], starts: np.ndarray, table: np.ndarray) -> None:
        """Sets `fields` [a `DecodeField` each, n] but SRC, a column of all inputs at a time."""
        blocks, offsets = np.divmod(starts, self._block_size)
        fields[DecodeField.TOKEN] = [entry.tokens[0] for entry in inputs]
        fields[DecodeField.FUTURE] = [PAD_SLOT if e.future_token is None else e.future_token for e in inputs]
        fields[DecodeField.POSITION] = starts
        fields[DecodeField.CONTEXT] = starts + 1
        fields[DecodeField.BLOCK] = table[np.arange(len(inputs)), blocks]
        fields[DecodeField.OFFSET] = offsets
        fields[DecodeField.DST] = [entry.dst_slot for entry in inputs]


class HasBlocks(Protocol):
    """One sequence's part of a step or a draft pass."""

    @property
    def block_ids(self) -> Sequence[int]: ...


class HostTable:
    """Block ids of the sequences that decode, each list in a row of its own for as long as it takes part.

    A sequence's list only grows, so that a step adds the new ids alone, whatever order its sequences come in.
    """

    def __init__(self, max_rows: int, max_blocks: int):
        self._table = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self._free = list(range(max_rows))
        self._known: dict[int, tuple[int, int, Sequence[int]]] = {}
        """By a list's identity: its row, how many ids are there, and itself, so that no other takes its identity."""

    def rows(self, inputs: Sequence[HasBlocks], width: int) -> np.ndarray:
        """[len(inputs), width], the first ids of each."""
        order = []
        for entry in inputs:
            ids = entry.block_ids
            kept = self._known.get(id(ids))
            if kept is None:
                if not self._free:
                    self._forget_all_but({id(each.block_ids) for each in inputs})
                kept = self._add_ids(ids, self._free.pop(), 0)
            elif kept[1] < len(ids):
                kept = self._add_ids(ids, kept[0], kept[1])
            order.append(kept[0])
        return self._table[order, :width]

    def _add_ids(self, ids: Sequence[int], row: int, num_known: int) -> tuple[int, int, Sequence[int]]:
        self._table[row, num_known : len(ids)] = ids[num_known:]
        self._known[id(ids)] = grown = row, len(ids), ids
        return grown

    def _forget_all_but(self, wanted: set[int]) -> None:
        for key in self._known.keys() - wanted:
            self._free.append(self._known.pop(key)[0])


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not less."""
    return cdiv(number, multiple) * multiple
