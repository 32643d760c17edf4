"""How many tokens of an answer wait to be sent, and whether the engine should go on with it. Pure."""

from __future__ import annotations


class UnsentTokens:
    """Counts the tokens that were sampled and not yet taken over by gRPC, which takes none while nobody reads.

    limit   the answer pauses with so many, and goes on when half of them are sent
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._is_paused = False

    def sampled(self, num_tokens: int) -> bool:
        """Adds tokens; True if the answer must pause now."""
        self._count += num_tokens
        if self._is_paused or self._count < self._limit:
            return False
        self._is_paused = True
        return True

    def sent(self, num_tokens: int) -> bool:
        """Takes tokens away; True if the answer may go on now."""
        self._count -= num_tokens
        if not self._is_paused or self._count > self._limit // 2:
            return False
        self._is_paused = False
        return True
