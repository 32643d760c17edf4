"""Token counts of sequences with penalties, on the device: made once, and advanced by one token a draw."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import torch
from torch import Tensor

from headrace.forward.upload import upload_ids
from headrace.kernels.sampling.penalties import IN_PROMPT, ONCE_IN_ANSWER


class TokenCounts:
    """A row [V] of int32 for each sequence with penalties, in the form that `penalise` reads.

    A row takes 4 bytes a token of the vocabulary: 0.95 MiB of 248,320. Only running sequences have one, each of which
    also has a slot, with a state of tens of MiB. Memory grows with the most rows in use at a time, in powers of two.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.empty(0, vocab_size, dtype=torch.int32, device=device)
        self._rows: dict[Hashable, int] = {}

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self._rows)

    def row(self, owner: Hashable, tokens: Sequence[int], num_prompt_tokens: int) -> int:
        """The owner's row. A new one counts `tokens`, the prompt and the answer so far; an old one has counted them."""
        row = self._rows.get(owner)
        if row is None:
            row = self._rows[owner] = self._new_row(tokens, num_prompt_tokens)
        return row

    def keep_only(self, owners: Collection[Hashable]) -> None:
        """Frees the rows of all others."""
        if self._rows:
            kept = set(owners)
            self._rows = {owner: row for owner, row in self._rows.items() if owner in kept}

    def advance(self, rows_K: Tensor, ids_K: Tensor) -> None:
        """Counts a drawn token in each of these rows, int64 [K] both. Waits for nothing."""
        once = torch.full_like(rows_K, ONCE_IN_ANSWER, dtype=torch.int32)
        self.counts.view(-1).index_add_(0, rows_K * self.counts.shape[1] + ids_K, once)

    def _new_row(self, tokens: Sequence[int], num_prompt_tokens: int) -> int:
        used = set(self._rows.values())
        row = next(number for number in range(len(used) + 1) if number not in used)
        if row == len(self.counts):
            grown = self.counts.new_empty(max(1, 2 * row), self.counts.shape[1])
            grown[:row] = self.counts
            self.counts = grown
        ids = upload_ids(tokens, self.counts.shape[1], "token", self.counts.device)
        prompt, answer = ids[:num_prompt_tokens], ids[num_prompt_tokens:]
        counts = self.counts[row].zero_().index_fill_(0, prompt, IN_PROMPT)
        counts.index_add_(0, answer, torch.full_like(answer, ONCE_IN_ANSWER, dtype=torch.int32))
        return row
