"""The steady part of a run, without its warm-up and its tail, and how much of a turn lies in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SteadyPart:
    """The time in which a run is measured, in seconds of the run's own clock."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def share_of(self, begun_s: float, ended_s: float) -> float:
        """The share of a turn's time that lies in the steady part, from 0 to 1; rates count the turn by it.

        Turns of a closed loop begin and end in waves. Counted whole when they end, a wave at the edge would be in or
        out altogether: an error of 15 % where the steady part lasts for three waves of long answers.
        """
        return max(min(ended_s, self.end_s) - max(begun_s, self.start_s), 0.0) / (ended_s - begun_s)
