"""What computing and fetching really take on one node: exponentially weighted averages, no clock of their own."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_node.fetch_policy import FetchCosts

WEIGHT = 0.2  # of one observation in an average
START_SECONDS = 0.1  # what a starting value counts as having been observed for
RELAXATION = 0.05  # how far one declined fetch takes the costs of fetching back to where they started
MIN_OBSERVED_TOKENS = 64  # a shorter prefill measures what a step costs, not what tokens cost


@dataclass(slots=True)
class _Rate:
    """Amount per second. Amounts and seconds fade alike, so that a long observation counts for more."""

    start: float
    amount: float
    seconds: float

    @classmethod
    def starting_at(cls, start: float) -> _Rate:
        return cls(start, start * START_SECONDS, START_SECONDS)

    @property
    def value(self) -> float:
        return self.amount / self.seconds

    def observe(self, amount: float, seconds: float) -> None:
        self.amount = (1 - WEIGHT) * self.amount + WEIGHT * amount
        self.seconds = (1 - WEIGHT) * self.seconds + WEIGHT * max(seconds, 1e-6)

    def relax(self) -> None:
        self.amount += RELAXATION * (self.start * self.seconds - self.amount)


class MeasuredCosts:
    """Told what happened, it says what to expect. A failed fetch that took longer than expected counts as latency: it
    is what the request waited. One that failed at once says nothing of how long those that land take.

    Costs of fetching that are too high would never be measured again, since nothing would be fetched: each time
    that a fetch is declined they go back a little towards their starting values.
    """

    def __init__(self, start: FetchCosts | None = None) -> None:
        self._start = start or FetchCosts()
        self._prefill = _Rate.starting_at(self._start.prefill_tokens_per_s)
        self._moving = _Rate.starting_at(self._start.bytes_per_s)
        self._latency_s = self._start.latency_s

    @property
    def now(self) -> FetchCosts:
        return FetchCosts(self._prefill.value, self._moving.value, self._latency_s)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A prefill took so long from its admission to its last token, with whatever ran beside it."""
        if num_tokens >= MIN_OBSERVED_TOKENS:
            self._prefill.observe(num_tokens, seconds)

    def fetched(self, num_bytes: int, moving_s: float, seconds: float) -> None:
        """A fetch took `seconds`, of which `moving_s` from its first message's arrival to its last one's landing."""
        self._moving.observe(num_bytes, moving_s)
        self._waited(seconds - moving_s)

    def failed(self, seconds: float) -> None:
        """A fetch was given up after so long: one that lands would have taken at least that."""
        self._waited(max(seconds, self._latency_s))

    def declined(self) -> None:
        """A fetch was possible and estimated not to pay."""
        self._moving.relax()
        self._latency_s += RELAXATION * (self._start.latency_s - self._latency_s)

    def _waited(self, seconds: float) -> None:
        self._latency_s += WEIGHT * (max(seconds, 0.0) - self._latency_s)
