"""Bad words of more than one token: the token that would complete one may not be drawn. Pure: no tensors.

Source: vLLM's `v1/sample/ops/bad_words.py`. As there, a bad word lies inside the answer: no part of it is prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

Tokens = tuple[int, ...]


class BadWords:
    """Sequences of at least two tokens that must not occur in one answer."""

    def __init__(self, words: Iterable[Tokens]) -> None:
        self._by_last: dict[int, list[Tokens]] = defaultdict(list)
        """By the last token before the one that completes it."""
        self._by_second_last: dict[int, list[Tokens]] = defaultdict(list)
        """By the token before that, for words of three or more."""
        self._pairs: list[tuple[int, int]] = []
        for word in words:
            *before, last, _ = word
            self._by_last[last].append(word)
            if before:
                self._by_second_last[before[-1]].append(word)
            else:
                self._pairs.append((word[0], word[1]))

    def banned(self, tokens: Sequence[int], start: int) -> list[int]:
        """Ids that would complete a bad word after `tokens`, of which the answer is `tokens[start:]`."""
        words = self._by_last.get(tokens[-1], ()) if len(tokens) > start else ()
        return [word[-1] for word in words if _ends_with(tokens, word[:-1], start)]

    def banned_after(self, tokens: Sequence[int], start: int) -> list[tuple[int, int]]:
        """(p, id) for each id that would complete a bad word, if p is the token between `tokens` and it."""
        words = self._by_second_last.get(tokens[-1], ()) if len(tokens) > start else ()
        longer = [(word[-2], word[-1]) for word in words if _ends_with(tokens, word[:-2], start)]
        return [*self._pairs, *longer]


def _ends_with(tokens: Sequence[int], end: Tokens, start: int) -> bool:
    first = len(tokens) - len(end)
    return first >= start and all(tokens[first + i] == token_id for i, token_id in enumerate(end))
