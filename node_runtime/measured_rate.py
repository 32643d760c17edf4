"""An exponentially weighted rate, such as the bytes a second of a link. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2  # of one observation in an average
START_SECONDS = 0.1  # a starting value counts as if it had been observed for so long
RELAXATION = 0.05  # how far `relax` moves a rate back towards its starting value


@dataclass(slots=True)
class MeasuredRate:
    """An amount per second. Amounts and seconds decay alike, so that a long observation weighs more."""

    start: float
    amount: float
    seconds: float

    @classmethod
    def starting_at(cls, start: float) -> MeasuredRate:
        return cls(start, start * START_SECONDS, START_SECONDS)

    @property
    def value(self) -> float:
        return self.amount / self.seconds

    def observe(self, amount: float, seconds: float) -> None:
        self.amount = (1 - WEIGHT) * self.amount + WEIGHT * amount
        self.seconds = (1 - WEIGHT) * self.seconds + WEIGHT * max(seconds, 1e-6)

    def relax(self) -> None:
        self.amount += RELAXATION * (self.start * self.seconds - self.amount)
