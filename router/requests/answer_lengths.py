"""How long answers get: what routing expects of the next one. `max_tokens` is often all that the model has left."""

from __future__ import annotations

RECENT = 64
FIRST_GUESS = 256.0


class AnswerLengths:
    """The mean length of about the last `RECENT` answers."""

    def __init__(self) -> None:
        self._mean = FIRST_GUESS
        self._number = 1

    def ended(self, num_tokens: int) -> None:
        """Counts a whole answer."""
        self._number = min(self._number + 1, RECENT)
        self._mean += (num_tokens - self._mean) / self._number

    def expected(self, max_tokens: int, num_tokens: int = 0) -> int:
        """Tokens to come of an answer of at most `max_tokens`, of which there are `num_tokens`."""
        left = max_tokens - num_tokens
        return min(left, max(1, round(self._mean) - num_tokens))
