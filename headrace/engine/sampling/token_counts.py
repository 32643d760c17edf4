"""Token counts of sequences with penalties, on the device: made once, and advanced by one token a draw."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from headrace.engine.sampling.sequence_rows import SequenceRows
from headrace.forward.upload import upload_ids
from headrace.kernels.sampling.penalties import IN_PROMPT, ONCE_IN_ANSWER


class TokenCounts(SequenceRows):
    """A row [V] of int32 for each sequence with penalties, in the form that `penalise` reads."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, torch.int32, device)

    def row(self, owner: Hashable, tokens: Sequence[int], num_prompt_tokens: int) -> int:
        """The owner's row. A new one counts `tokens`, the prompt and the answer so far; an old one has counted them."""
        row, fresh = self._row_of(owner)
        if fresh is not None:
            ids = upload_ids(tokens, len(fresh), "token", fresh.device)
            prompt, answer = ids[:num_prompt_tokens], ids[num_prompt_tokens:]
            fresh.zero_().index_fill_(0, prompt, IN_PROMPT)
            fresh.index_add_(0, answer, torch.full_like(answer, ONCE_IN_ANSWER, dtype=torch.int32))
        return row

    def row_after(self, owner: Hashable, drafts: Sequence[int]) -> int:
        """A row for one step: what the owner's row counts, and these drafts of its answer; at least one.

        NO_TOKEN counts as 0: it is never right, and so no token that is drawn behind it is kept.
        """
        row, fresh = self._row_of((owner, len(drafts)))
        assert fresh is not None, "rows of drafts are freed after their step"
        ids = upload_ids([max(draft, 0) for draft in drafts], len(fresh), "token", fresh.device)
        fresh.copy_(self.values[self._rows[owner]])
        fresh.index_add_(0, ids, torch.full_like(ids, ONCE_IN_ANSWER, dtype=torch.int32))
        return row

    def count(self, owner: Hashable, ids: Sequence[int]) -> None:
        """Counts tokens of an answer that its row has not counted when they were drawn."""
        row = self._rows.get(owner)
        if row is not None:
            drawn = upload_ids(ids, self.values.shape[1], "token", self.values.device)
            self.advance(torch.full_like(drawn, row), drawn)

    def advance(self, rows_K: Tensor, ids_K: Tensor) -> None:
        """Counts a drawn token in each of these rows, int64 [K] both. Waits for nothing.

        NO_TOKEN counts as 0: its sequence is about to end.
        """
        once = torch.full_like(rows_K, ONCE_IN_ANSWER, dtype=torch.int32)
        self.values.view(-1).index_add_(0, rows_K * self.values.shape[1] + ids_K.clamp(min=0), once)
