"""Inputs of a captured mixed pass: those of a captured decode, and behind them those of a captured prefill.

Legend    D decode rows, N sequences at most besides the padding in a prefill
"""

from collections.abc import Sequence

import numpy as np
import torch

from headrace.engine.decode_inputs import DecodeInputs
from headrace.engine.prefill_inputs import MOST_SEQUENCES, PrefillInputs
from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.paged_attention import PagedDecode


class MixedInputs:
    """D rows of single tokens or padding, then the rows of chunks. The tensors are those of both kinds of inputs."""

    def __init__(self, decodes: DecodeInputs, prefills: PrefillInputs, num_decodes: int):
        self._decodes, self._prefills, self._num_decodes = decodes, prefills, num_decodes
        # Which of the D + N rows that may have logits comes first, second and so on.
        self._order = torch.zeros(num_decodes + MOST_SEQUENCES, dtype=torch.int64, device=decodes.device)

    def num_rows(self, inputs: Sequence[SequenceInput]) -> int:
        return self._num_decodes + self._prefills.num_rows(_longer(inputs))

    def fits(self, inputs: Sequence[SequenceInput]) -> bool:
        """True if `load` takes them: single tokens, at most D, and chunks of prompts, some of each."""
        single, longer = _single(inputs), _longer(inputs)
        return (
            0 < len(single) <= self._num_decodes
            and bool(longer)
            and self._decodes.fits(single)
            and self._prefills.fits(longer)
        )

    def load(self, inputs: Sequence[SequenceInput], num_rows: int) -> None:
        """Loads the rows of these inputs, padded to D and to `num_rows` in all. Waits for nothing.

        inputs   the single tokens come first
        """
        single, longer = _single(inputs), _longer(inputs)
        self._decodes.load(single, self._num_decodes)
        self._prefills.load(longer, num_rows - self._num_decodes)
        order = torch.zeros(len(self._order), dtype=torch.int64, pin_memory=self._order.is_cuda)
        wanted = [row for row, entry in enumerate(single) if entry.num_logits]
        wanted += range(self._num_decodes, self._num_decodes + sum(entry.num_logits for entry in longer))
        order.numpy()[: len(wanted)] = np.array(wanted, dtype=np.int64)
        self._order.copy_(order, non_blocking=True)

    def batch(self, num_rows: int) -> ForwardBatch:
        """The loaded rows as a batch, with D + N rows of logits: first those of the inputs, in the order of `load`."""
        D = self._num_decodes
        decodes, prefills = self._decodes.batch(D), self._prefills.batch(num_rows - D)
        assert decodes.decode is not None and prefills.logit_rows is not None
        last_rows = torch.cat((torch.arange(D, device=self._order.device), prefills.logit_rows + D))
        contexts = [
            queries.contexts
            for queries in (decodes.decode.attention, prefills.last_token_queries)
            if queries is not None and isinstance(queries.contexts, PagedContexts)
        ]
        width = min(each.table_NM.shape[1] for each in contexts)  # each holds the longest sequence
        lens = torch.cat([each.lens_R for each in contexts]).index_select(0, self._order)
        table = torch.cat([each.table_NM[:, :width] for each in contexts]).index_select(0, self._order)
        return ForwardBatch(
            num_decodes=D,
            decode=decodes.decode,
            prefill=prefills.prefill,
            tokens_T=torch.cat((decodes.tokens_T, prefills.tokens_T)),
            positions_T=torch.cat((decodes.positions_T, prefills.positions_T)),
            block_T=torch.cat((decodes.block_T, prefills.block_T)),
            offset_T=torch.cat((decodes.offset_T, prefills.offset_T)),
            logit_rows=last_rows.index_select(0, self._order),
            last_token_queries=PagedDecode(len(self._order), PagedContexts(lens, table)),
        )


def _single(inputs: Sequence[SequenceInput]) -> list[SequenceInput]:
    return [entry for entry in inputs if entry.is_decode]


def _longer(inputs: Sequence[SequenceInput]) -> list[SequenceInput]:
    return [entry for entry in inputs if not entry.is_decode]
