"""How fast a node computes prompts while there are more of them than a step takes. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_S = 10.0
"""Seconds of computing after which a measurement counts half: a few long steps on a CPU, hundreds on a GPU."""


@dataclass(frozen=True)
class RateMark:
    """A launched step. `num_tokens`: computed when it is done, by it and by all steps before it."""

    num_tokens: int
    began_s: float


class PrefillRate:
    """Measures from one moment at which launched steps are known to be done to the next.

    Steps count that left prompts waiting. Others show what was asked for and not what the node can do: a lone prompt of
    five tokens takes as long as one of a hundred. They count only if they were faster than the speed so far, even with
    the time that they waited for the step before: requests are refused by this speed, and after one slow step, such as
    that of a host which was suspended, no prompts might ever be left waiting again. Time without prompts changes
    nothing.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._launched = 0
        self._done = 0
        self._since_s = 0.0
        self._leaves_some = False

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens a second, with whatever else ran beside them; 0: not measured yet."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def launched(self, num_tokens: int, *, leaves_some: bool, began_s: float) -> RateMark:
        """Notes a step, begun at `began_s`, that computes these tokens of prompts; returns its mark for `done`."""
        if self._launched == self._done:
            self._since_s, self._leaves_some = began_s, False
        self._launched += num_tokens
        self._leaves_some |= leaves_some
        return RateMark(self._launched, began_s)

    def done(self, mark: RateMark, now_s: float) -> None:
        """Notes that the device has computed the step with this mark, and with it those before it."""
        num_tokens = mark.num_tokens - self._done
        if not num_tokens:
            return
        if self._leaves_some:
            self._count(num_tokens, now_s - self._since_s)
        elif 0 < self.tokens_per_s * (now_s - mark.began_s) < num_tokens:
            self._count(num_tokens, now_s - mark.began_s)
        self._done, self._since_s = mark.num_tokens, now_s

    def _count(self, num_tokens: int, seconds: float) -> None:
        if seconds > 0:
            decay = 0.5 ** (seconds / HALF_LIFE_S)
            self._tokens = self._tokens * decay + num_tokens
            self._seconds = self._seconds * decay + seconds
