"""The tokens from which a model's layer drafts: as many as its head has rows, first of all those that occur. Pure.

A head of a quarter of a million rows takes half of a pass that drafts one token. Few of its tokens are ever right:
vocabularies of byte pairs give low ids to frequent tokens, and what else a node's clients write stands in their prompts
before it stands in an answer. So the head begins with the lowest ids, and a token that occurs takes another one's row.

Source    Zhao et al. 2025, "FR-Spec": a head of the most frequent tokens, counted beforehand
"""

from __future__ import annotations

import numpy as np


class DraftVocabulary:
    """Which token each of `num_rows` rows stands for; `num_rows` is less than `vocab_size`.

    Tokens that occurred last have rows first; those that have not occurred give theirs up first, highest ids before
    others.
    """

    def __init__(self, vocab_size: int, num_rows: int) -> None:
        self._token_of = np.arange(num_rows)
        self._has_row = np.arange(vocab_size) < num_rows
        self._last_call = np.zeros(vocab_size, dtype=np.int64)  # of `add` with this token; 0: none
        self._num_calls = 0

    def add(self, tokens: np.ndarray) -> None:
        """Tokens of prompts and answers, of any integer type."""
        self._num_calls += 1
        self._last_call[tokens] = self._num_calls

    def changes(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Up to `most` rows, and the tokens that should have them: int64 [n] each. They do once `made` is called."""
        missing = np.flatnonzero((self._last_call > 0) & ~self._has_row)
        tokens = missing[np.argsort(-self._last_call[missing], kind="stable")][: min(most, len(self._token_of))]
        if not len(tokens):
            return tokens, tokens
        last_call = self._last_call[self._token_of]
        rows = np.argpartition(last_call * len(self._has_row) - self._token_of, len(tokens) - 1)[: len(tokens)]
        rows = rows[np.argsort(last_call[rows], kind="stable")]
        is_gain = last_call[rows] < self._last_call[tokens]
        return rows[is_gain], tokens[is_gain]

    def made(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """The rows stand for these tokens from now on."""
        self._has_row[self._token_of[rows]] = False
        self._has_row[tokens] = True
        self._token_of[rows] = tokens
