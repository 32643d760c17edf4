"""Seconds for which something that should count on has stood still. Imports little: `pulse_watcher.py` needs it."""

from __future__ import annotations

TICK_S = 0.25
LONGEST_TICK_S = 1.0


class StallClock:
    """Seconds for which a count has stood still. Pure.

    Counted in ticks of at most LONGEST_TICK_S, so that a process which was stopped as a whole, or got no processor,
    does not take what it watches for hung when it goes on.
    """

    def __init__(self) -> None:
        self._count = -1
        self._last_s = 0.0
        self.stalled_s = 0.0

    def tick(self, count: int, now_s: float) -> None:
        moved, self._count = count != self._count, count
        self.stalled_s = 0.0 if moved else self.stalled_s + min(now_s - self._last_s, LONGEST_TICK_S)
        self._last_s = now_s
