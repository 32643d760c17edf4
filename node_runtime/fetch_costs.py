"""Measured costs of fetching on one node, as exponentially weighted averages. Pure: no clock."""

from __future__ import annotations

from node_runtime.fetch_policy import FetchCosts
from node_runtime.measured_rate import RELAXATION, WEIGHT, MeasuredRate


class MeasuredFetches:
    """Estimates from what was observed so far.

    A failed fetch that took longer than expected counts as latency, because the request waited for it. One that failed
    at once does not show how long a fetch that lands takes.

    If fetching were estimated too dear, nothing would be fetched and the estimate would never be corrected: each
    declined fetch therefore moves the estimate a little towards its starting value. That is the speed of the link to
    the source, once it is known: the other way it is taken to be as fast.
    """

    def __init__(self, start: FetchCosts | None = None) -> None:
        self._start = start or FetchCosts()
        self._transfer = MeasuredRate.starting_at(self._start.bytes_per_s)
        self._latency_s = self._start.latency_s
        self._has_fetched = False

    @property
    def now(self) -> FetchCosts:
        return FetchCosts(self._transfer.value, self._latency_s)

    def link_measured(self, bytes_per_s: float) -> None:
        """Takes over the speed of the link to a source, as far as no fetch has shown what fetches over it take."""
        if self._has_fetched:
            self._transfer.start = bytes_per_s
        else:
            self._transfer = MeasuredRate.starting_at(bytes_per_s)

    def fetched(self, num_bytes: int, moving_s: float, seconds: float) -> None:
        """Records a fetch of `seconds`: `moving_s` of them from its first message's arrival to its last landing."""
        self._transfer.observe(num_bytes, moving_s)
        self._has_fetched = True
        self._waited(seconds - moving_s)

    def failed(self, seconds: float) -> None:
        """Records a fetch given up after so long: one that lands would have taken at least that."""
        self._waited(max(seconds, self._latency_s))

    def declined(self) -> None:
        """Records that a fetch was possible and estimated not to pay."""
        self._transfer.relax()
        self._latency_s += RELAXATION * (self._start.latency_s - self._latency_s)

    def _waited(self, seconds: float) -> None:
        self._latency_s += WEIGHT * (max(seconds, 0.0) - self._latency_s)
