"""Inputs of a captured mixed pass: those of a captured decode or check, and behind them those of a captured prefill.

Legend    D rows of the decode or check, N sequences at most besides the padding in a prefill
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch

from headrace.engine.graphs.captured_passes import Inputs
from headrace.engine.graphs.prefill_inputs import MOST_SEQUENCES, PrefillInputs
from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.paged_attention import PagedDecode

MOST_PADDING = 192
"""Rows of single tokens that may be padding: more take longer than to read the weights again."""


class MixedInputs:
    """D rows of single tokens, their drafts or padding, then the rows of chunks. The tensors are those of both kinds of
    inputs."""

    def __init__(self, singles: Inputs, prefills: PrefillInputs, num_single_rows: int):
        """`singles`: of single tokens, or of these with drafts; `num_single_rows`: D, to which they are padded."""
        self._singles, self._prefills, self._num_single_rows = singles, prefills, num_single_rows
        # Which of the D + N rows that may have logits comes first, second and so on.
        self._order = torch.zeros(num_single_rows + MOST_SEQUENCES, dtype=torch.int64, device=prefills.device)

    def num_rows(self, inputs: Sequence[SequenceInput]) -> int:
        return self._num_single_rows + self._prefills.num_rows(_parts(inputs)[1])

    def fits(self, inputs: Sequence[SequenceInput]) -> bool:
        """True if `load` takes them and that pays: up to D rows of single tokens, and chunks of prompts behind them."""
        single, longer = _parts(inputs)
        num_rows = self._singles.num_rows(single)
        return (
            0 < num_rows <= self._num_single_rows <= num_rows + MOST_PADDING
            and bool(longer)
            and self._prefills.fits(longer)
            and self._singles.fits(single)
        )

    def load(self, inputs: Sequence[SequenceInput], num_rows: int) -> None:
        """Loads the rows of these inputs, padded to D and to `num_rows` in all. Waits for nothing.

        inputs   the single tokens come first, and among these and among the chunks those with logits
        """
        single, longer = _parts(inputs)
        self._singles.load(single, self._num_single_rows)
        self._prefills.load(longer, num_rows - self._num_single_rows)
        of_singles, of_chunks = (sum(entry.num_logits for entry in part) for part in (single, longer))
        order = torch.zeros(len(self._order), dtype=torch.int64, pin_memory=self._order.is_cuda)
        torch.arange(of_singles, out=order[:of_singles])
        first, last = self._num_single_rows, self._num_single_rows + of_chunks
        torch.arange(first, last, out=order[of_singles : of_singles + of_chunks])
        self._order.copy_(order, non_blocking=True)

    def batch(self, num_rows: int) -> ForwardBatch:
        """The loaded rows as a batch, with D + N rows of logits: first those of the inputs, in the order of `load`."""
        D = self._num_single_rows
        singles, prefills = self._singles.batch(D), self._prefills.batch(num_rows - D)
        assert prefills.logit_rows is not None
        of_singles = torch.arange(D, device=self._order.device) if singles.logit_rows is None else singles.logit_rows
        logit_rows = torch.cat((of_singles, prefills.logit_rows + D)).index_select(0, self._order)
        return ForwardBatch(
            num_decodes=D,
            decode=singles.decode,
            prefill=prefills.prefill,
            tokens_T=torch.cat((singles.tokens_T, prefills.tokens_T)),
            positions_T=torch.cat((singles.positions_T, prefills.positions_T)),
            block_T=torch.cat((singles.block_T, prefills.block_T)),
            offset_T=torch.cat((singles.offset_T, prefills.offset_T)),
            logit_rows=logit_rows,
            last_token_queries=self._last_token_queries(singles, prefills),
        )

    def _last_token_queries(self, singles: ForwardBatch, prefills: ForwardBatch) -> PagedDecode | None:
        """Attention of the logit rows, each its sequence's last; None in a check.

        A check has several of a sequence: each would read its context anew, which attention of all rows reads once.
        """
        if singles.logit_rows is not None:
            return None
        assert singles.decode is not None
        contexts = [
            queries.contexts
            for queries in (singles.decode.attention, prefills.last_token_queries)
            if queries is not None and isinstance(queries.contexts, PagedContexts)
        ]
        width = min(each.table_NM.shape[1] for each in contexts)  # each holds the longest sequence
        lens = torch.cat([each.lens_R for each in contexts]).index_select(0, self._order)
        table = torch.cat([each.table_NM[:, :width] for each in contexts]).index_select(0, self._order)
        return PagedDecode(len(self._order), PagedContexts(lens, table))


def _parts(inputs: Sequence[SequenceInput]) -> tuple[Sequence[SequenceInput], Sequence[SequenceInput]]:
    """The single tokens, with drafts or without, and the chunks behind them.

    A step asks several passes whether it fits, so that this looks at few of its inputs.
    """
    num_single = bisect_left(inputs, True, key=lambda entry: not (entry.is_decode or entry.has_drafts))
    return inputs[:num_single], inputs[num_single:]
