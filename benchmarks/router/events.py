"""Simulated time: a queue of calls, each at its moment."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """Calls in order of their moments; those of one moment in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_calls = 0
        self._next = 0
        self._calls: list[tuple[float, int, Callable[..., None], Any]] = []

    def at(self, moment_s: float, call: Callable[..., None], argument: Any) -> None:
        """Calls `call(argument)` at `moment_s`, which is not in the past."""
        if moment_s < self.now_s:
            raise ValueError(f"moment {moment_s} s lies before {self.now_s} s")
        self._next += 1
        heapq.heappush(self._calls, (moment_s, self._next, call, argument))

    def run(self) -> None:
        """Runs until nothing is left to happen."""
        calls = self._calls
        while calls:
            self.now_s, _, call, argument = heapq.heappop(calls)
            self.num_calls += 1
            call(argument)
