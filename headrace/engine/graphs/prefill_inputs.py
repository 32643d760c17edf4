"""Inputs of a captured prefill: tensors at fixed addresses, filled for each pass by one copy.

Rows behind those of the sequences are padding, and padding is one more sequence: it begins in a fresh state, leaves
none, has no context but itself, and keeps its keys and values in the scratch block. Its results are finite and never
read.

Legend    R rows, N sequences at most besides the padding, M blocks a sequence at most
"""

from array import array
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from headrace.forward.forward_batch import ForwardBatch, PrefillRows
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.paged_attention import PagedDecode, PagedPrefill
from headrace.kernels.attention.prefill import PagedChunks
from headrace.kernels.lib.captured_segments import CapturedSegments
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.upload import StaticInts

MOST_SEQUENCES = 8  # a limit of sixteen would make passes of one to four 3 to 7 % longer
MOST_WRITES = 16  # states after the sequences' last rows, and checkpoints inside them


class PrefillField(IntEnum):
    """The numbers that describe a row."""

    TOKEN = 0
    POSITION = 1
    BLOCK = 2  # block and offset that its keys and values go to
    OFFSET = 3


class PrefillInputs:
    """The inputs of passes of up to `max_rows` rows; each captured number of rows has its own."""

    def __init__(self, memory: CacheMemory, max_rows: int, max_tokens: int):
        """No sequence is longer than `max_tokens`."""
        self.device = memory.device
        self._memory = memory
        self._max_tokens = max_tokens
        # A multiple of sixteen, as in `DecodeInputs`; padding may be longer than any sequence.
        self._max_blocks = cdiv(max(max_tokens, max_rows), 16 * memory.layout.block_size) * 16
        self._passes: dict[int, _Pass] = {}

    def num_rows(self, inputs: Sequence[SequenceInput]) -> int:
        return sum(len(entry.tokens) for entry in inputs)

    def fits(self, inputs: Sequence[SequenceInput]) -> bool:
        """True if `load` takes them: chunks of prompts, each with the logits of its last token or none."""
        return (
            len(inputs) <= MOST_SEQUENCES
            and sum(1 + len(entry.emit) for entry in inputs) <= MOST_WRITES
            and all(not entry.is_decode for entry in inputs)
            and all(entry.num_logits <= 1 and entry.end <= self._max_tokens for entry in inputs)
        )

    def load(self, inputs: Sequence[SequenceInput], num_rows: int) -> None:
        """Loads the steps' rows, those with logits first, and padding up to `num_rows`. Waits for nothing."""
        self._passes[num_rows].load(inputs)

    def batch(self, num_rows: int) -> ForwardBatch:
        """The loaded pass as a batch, all padding at first.

        Its first logit rows are those of the steps in the order of `load`; the rest of the N belong to padding.
        """
        if num_rows not in self._passes:
            self._passes[num_rows] = _Pass(num_rows, self._memory, self._max_blocks)
        return self._passes[num_rows].batch()


class _Pass:
    """The inputs of passes of one number of rows."""

    def __init__(self, num_rows: int, memory: CacheMemory, max_blocks: int):
        self._num_rows, self._block_size = num_rows, memory.layout.block_size
        most_sequences = MOST_SEQUENCES + 1
        # The segments' tables, of few numbers a chunk or tile, fit in twice the rows' numbers.
        self._ints = StaticInts(most_sequences * max_blocks + 3 * len(PrefillField) * num_rows + 1024, memory.device)
        self._host_rows, self._rows = self._ints.take(len(PrefillField), num_rows)
        self._host_first_rows, first_rows = self._ints.take(most_sequences + 1)
        self._host_starts, starts = self._ints.take(most_sequences)
        self._host_last_rows, self._last_rows = self._ints.take(MOST_SEQUENCES)
        self._host_contexts, contexts = self._ints.take(MOST_SEQUENCES)
        self._host_table, table = self._ints.take(most_sequences, max_blocks)
        self._host_table[-1] = memory.scratch_block
        self._segments = CapturedSegments(num_rows, most_sequences, MOST_WRITES, self._ints, memory.device)
        self._attention = PagedPrefill((num_rows,), PagedChunks(first_rows, starts, table))
        self._last_token_queries = PagedDecode(MOST_SEQUENCES, PagedContexts(contexts, table[:MOST_SEQUENCES]))
        self.load([])

    def batch(self) -> ForwardBatch:
        tokens, positions, blocks, offsets = self._rows.long().unbind()
        return ForwardBatch(
            num_decodes=0,
            decode=None,
            prefill=PrefillRows(self._segments, self._attention),
            tokens_T=tokens,
            positions_T=positions,
            block_T=blocks,
            offset_T=offsets,
            logit_rows=self._last_rows.long(),
            last_token_queries=self._last_token_queries,
        )

    def load(self, inputs: Sequence[SequenceInput]) -> None:
        ordered = sorted(inputs, key=lambda entry: -entry.num_logits)
        num_unused = MOST_SEQUENCES - len(ordered)
        lengths = [len(entry.tokens) for entry in ordered] + [0] * num_unused
        lengths.append(self._num_rows - sum(lengths))
        first_rows = np.cumsum([0, *lengths])
        self._host_first_rows[:] = first_rows
        for i, entry in enumerate(ordered):
            ids = np.frombuffer(array("i", entry.block_ids[: cdiv(entry.end, self._block_size)]), np.int32)
            self._host_table[i, : len(ids)] = ids
            self._set_rows(slice(first_rows[i], first_rows[i + 1]), entry.tokens, entry.start, ids)
        self._set_rows(slice(first_rows[-2], self._num_rows), 0, 0, self._host_table[-1])
        self._host_starts[:] = [entry.start for entry in ordered] + [0] * (num_unused + 1)
        self._host_last_rows[:] = [row - 1 for row in first_rows[1 : len(ordered) + 1]] + [0] * num_unused
        self._host_contexts[:] = [entry.end for entry in ordered] + [0] * num_unused
        writes = [
            [(num_tokens - entry.start, slot) for num_tokens, slot in (*entry.emit, (entry.end, entry.dst_slot))]
            for entry in ordered
        ]
        without_state = num_unused + 1
        self._segments.fill(
            lengths, [*(entry.src_slot for entry in ordered), *[None] * without_state], [*writes, *[[]] * without_state]
        )
        self._ints.upload()

    def _set_rows(self, rows: slice, tokens: Sequence[int] | int, start: int, block_ids: np.ndarray) -> None:
        fields = self._host_rows[:, rows]
        positions = np.arange(start, start + fields.shape[1])
        fields[PrefillField.TOKEN] = tokens
        fields[PrefillField.POSITION] = positions
        fields[PrefillField.BLOCK] = block_ids[positions // self._block_size]
        fields[PrefillField.OFFSET] = positions % self._block_size
