"""How long a request would wait for its place, from what was measured. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

RECENT = 64


class WaitEstimate:
    """By Little's law: each place is taken for the mean time of recent requests, whatever the nodes do
    meanwhile. Requests that run already longer than that raise the mean, so that a cluster that slows down, or has
    lost its nodes, is noticed before a request ends."""

    def __init__(self) -> None:
        self._recent: deque[tuple[str, float]] = deque(maxlen=RECENT)

    def ended(self, client: str, seconds: float) -> None:
        """Records for how long a request had its place."""
        self._recent.append((client, seconds))

    def usual_s(self, client: str, running_s: Iterable[float]) -> float:
        """Time in a place that nine of ten recent requests of this client did not exceed, or the mean of its running
        ones if that is more; 0 for a client of which nothing is known. A few that take all their time must not keep
        others out, and neither must another client whose every request does."""
        ordered = sorted(seconds for each, seconds in self._recent if each == client)
        return max(ordered[len(ordered) * 9 // 10] if ordered else 0.0, _mean(running_s))

    def wait_s(self, position: int, num_places: int, running_s: Iterable[float], nodes_line_s: float) -> float:
        """Wait at a position of the line, of which 1 is the first.

        num_places     requests that run at a time
        nodes_line_s   by which the prompts that the nodes have delay one like it; the line's own will take as long,
                       place for place
        """
        by_places = position * max(_mean(seconds for _, seconds in self._recent), _mean(running_s)) / num_places
        by_prompts = nodes_line_s * (1 + position / num_places)
        return max(by_places, by_prompts)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
