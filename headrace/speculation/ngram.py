"""Drafts from the sequence itself: what followed its last tokens when they occurred before (prompt lookup).

Source: A. Saxena, Prompt Lookup Decoding, 2023. Occurrences are found by chains as in LZ77 compressors: each position
knows the previous one with the same `min_match` tokens before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

MIN_MATCH_TOKENS = 3
MAX_MATCH_TOKENS = 16
TRIED_OCCURRENCES = 16
"""Occurrences that are compared, latest first: a frequent phrase costs a step no more than a rare one."""
INDEXED_A_CALL = 2048
"""Tokens that one call adds at most: a long prompt does not hold up the step. Until all are in, nothing is drafted."""


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the last tokens: how many agree, and the position behind them."""

    length: int
    end: int


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
        match = self.match(tokens)
        return [] if match is None else periodic(tokens, match.end, max_drafts)

    def match(self, tokens: Sequence[int]) -> Match | None:
        """The latest of the longest earlier occurrences of the last tokens; None: there is none, or none known yet."""
        self._index(tokens)
        if len(self._previous_end) != len(tokens):
            return None
        best, end = Match(0, 0), self._before(len(tokens))
        for _ in range(TRIED_OCCURRENCES):
            if end < 0 or best.length == self._max_match:
                break
            length = agreeing(tokens, tokens, end, self._max_match)
            if length > best.length:
                best = Match(length, end)
            end = self._before(end)
        return best if best.length else None

    def _index(self, tokens: Sequence[int]) -> None:
        size, done = self._min_match, len(self._previous_end)
        for end in range(done + 1, min(len(tokens), done + INDEXED_A_CALL) + 1):
            gram = tuple(tokens[end - size : end]) if end >= size else None
            self._previous_end.append(-1 if gram is None else self._last_end.get(gram, -1))
            if gram is not None:
                self._last_end[gram] = end

    def _before(self, end: int) -> int:
        return self._previous_end[end - 1] if end else -1


def agreeing(last: Sequence[int], tokens: Sequence[int], end: int, most: int) -> int:
    """How many tokens before `end` equal the last ones of `last`, up to `most`."""
    length, most = 0, min(most, end, len(last))
    while length < most and tokens[end - 1 - length] == last[-1 - length]:
        length += 1
    return length


def periodic(tokens: Sequence[int], start: int, num_tokens: int) -> list[int]:
    """The tokens from `start` on, and these again and again."""
    period = len(tokens) - start
    return [tokens[start + index % period] for index in range(num_tokens)]
