"""Drafts from the sequence itself: what followed its last tokens when they occurred before (prompt lookup).

Source: A. Saxena, Prompt Lookup Decoding, 2023. Occurrences are found by chains as in LZ77 compressors: each position
knows the previous one with the same `min_match` tokens before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MIN_MATCH_TOKENS = 3
MAX_MATCH_TOKENS = 16
TRIED_OCCURRENCES = 16
"""Occurrences that are compared, latest first: a frequent phrase costs a step no more than a rare one."""
INDEXED_A_CALL = 2048
"""Tokens that one call adds at most: a long prompt does not hold up the step. Until all are in, nothing is drafted."""


class NgramDrafter:
    """Proposes what followed the latest of the longest earlier occurrences of the sequence's last tokens.

    min_match   tokens that must have occurred before, at least
    max_match   tokens that are compared at most: of two occurrences that agree in so many, the later one counts
    """

    def __init__(self, min_match: int = MIN_MATCH_TOKENS, max_match: int = MAX_MATCH_TOKENS) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._last_end: dict[tuple[int, ...], int] = {}
        self._previous_end = array("i")  # by end of `min_match` tokens: the end of their previous occurrence, or -1

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Copies what followed; a match that reaches into its own continuation goes on periodically."""
        self._index(tokens)
        if len(self._previous_end) != len(tokens):
            return []
        source = self._best_end(tokens)
        if source is None:
            return []
        period = len(tokens) - source
        return [tokens[source + index % period] for index in range(max_drafts)]

    def _index(self, tokens: Sequence[int]) -> None:
        size, done = self._min_match, len(self._previous_end)
        for end in range(done + 1, min(len(tokens), done + INDEXED_A_CALL) + 1):
            gram = tuple(tokens[end - size : end]) if end >= size else None
            self._previous_end.append(-1 if gram is None else self._last_end.get(gram, -1))
            if gram is not None:
                self._last_end[gram] = end

    def _best_end(self, tokens: Sequence[int]) -> int | None:
        """The position behind the occurrence that agrees with most of the last tokens; None: there is none."""
        best, best_length, end = None, 0, self._before(len(tokens))
        for _ in range(TRIED_OCCURRENCES):
            if end is None or best_length == self._max_match:
                break
            length = self._agreeing(tokens, end)
            if length > best_length:
                best, best_length = end, length
            end = self._before(end)
        return best

    def _before(self, end: int) -> int | None:
        previous = self._previous_end[end - 1] if end else -1
        return None if previous < 0 else previous

    def _agreeing(self, tokens: Sequence[int], end: int) -> int:
        """How many tokens before `end` are the sequence's last ones, up to `max_match`."""
        length, last = self._min_match, len(tokens)
        while length < min(self._max_match, end) and tokens[end - 1 - length] == tokens[last - 1 - length]:
            length += 1
        return length
