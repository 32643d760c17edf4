"""The tokens from which a model's layer drafts: as many as its head has rows, first of all those that occur. Pure.

A head of a quarter of a million rows takes half of a pass that drafts one token. Few of its tokens are ever right:
vocabularies of byte pairs give low ids to frequent tokens, and what else a node's clients write stands in their prompts
before it stands in an answer. So the head begins with the lowest ids, and a token that occurs takes another one's row.

Source    Zhao et al. 2025, "FR-Spec": a head of the most frequent tokens, counted beforehand
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class DraftVocabulary:
    """Which token each of `num_rows` rows stands for; `num_rows` is less than `vocab_size`.

    Rows are given up by tokens that have not occurred, highest ids first, then by those that have not for longest.
    """

    def __init__(self, vocab_size: int, num_rows: int) -> None:
        self._token_of = np.arange(num_rows)
        self._has_row = np.arange(vocab_size) < num_rows
        self._last_call = np.zeros(vocab_size, dtype=np.int64)  # of `add` with this token; 0: none
        self._num_calls = 0
        self._missing: dict[int, None] = {}  # tokens that have occurred and have no row, in order

    def add(self, tokens: Sequence[int]) -> None:
        """Tokens of prompts and answers."""
        found = np.asarray(tokens, dtype=np.int64)
        self._num_calls += 1
        self._last_call[found] = self._num_calls
        self._missing |= dict.fromkeys(found[~self._has_row[found]].tolist())

    def changes(self, most: int) -> list[tuple[int, int]]:
        """Up to `most` rows, and the tokens that have occurred for which they stand from now on."""
        tokens = [*self._missing][: min(most, len(self._token_of))]
        if not tokens:
            return []
        vocab_size = len(self._has_row)
        use = self._last_call[self._token_of] * vocab_size + vocab_size - self._token_of
        rows = np.argpartition(use, len(tokens) - 1)[: len(tokens)]
        self._has_row[self._token_of[rows]] = False
        self._has_row[tokens] = True
        self._token_of[rows] = tokens
        for token in tokens:
            del self._missing[token]
        return [*zip(rows.tolist(), tokens, strict=True)]
