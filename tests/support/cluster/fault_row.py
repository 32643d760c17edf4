"""What came of one kind of fault, as a row of a table."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.cluster.recall_clients import Answer
from tests.support.cluster.recall_load import RecallLoad, percentile

QUARANTINED = "the nodes that computed this request were lost with it"
"""Of the router's message for a request that has lost two nodes: no third one gets it. It comes as a status 500, or in
a stream that had begun."""


@dataclass(frozen=True)
class HostDeath:
    """All nodes of a host were lost from `began_s` on; at `ended_s` they were back."""

    began_s: float
    ended_s: float


@dataclass
class Row:
    """rounds       faults; where they aim at sessions, those that met one
    missed       those that met none, and were repeated
    errors       that clients met, but for quarantine; given_up: of the questions, those that got no answer at all
    quarantined  questions that were refused once for having lost two nodes, whoever's fault that was
    drafted      tokens that nodes drafted since they started last; accepted: those that were right
    dropped      parts that came when nobody expected them any more
    known_s      from the fault until a survivor's session had failed: a round's first; each one of a killed node; each
                 one of a cut network, from its own beginning if that was behind the cut
    faults_s     when they were committed
    host_deaths  one of them may cost a request one of its two nodes, however many the host had
    served_s     from the fault until a question asked after it was answered right
    slowest_answer_s  from question to answer, errors and repetitions included
    sessions_failed   on all nodes, by cause: each of them was repaired, or its client got an error
    """

    name: str
    rounds: int = 0
    missed: int = 0
    right: int = 0
    migrated: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    quarantined: list[Answer] = field(default_factory=list)
    given_up: int = 0
    wrong: list[str] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    dropped: int = 0
    sessions_failed: dict[str, int] = field(default_factory=dict)
    known_s: list[float] = field(default_factory=list)
    faults_s: list[float] = field(default_factory=list)
    host_deaths: list[HostDeath] = field(default_factory=list)
    served_s: list[float] = field(default_factory=list)
    slowest_answer_s: float = 0.0
    seconds: float = 0.0

    def judge(self, load: RecallLoad) -> None:
        """Once no more answers come."""
        self.right, self.migrated, self.given_up = load.num_right, load.num_migrated, load.num_given_up
        self.errors = {error: n for error, n in load.errors.items() if QUARANTINED not in error}
        self.quarantined = [it for it in load.answers if any(QUARANTINED in e for e in it.errors)]
        self.wrong = load.wrong
        self.slowest_answer_s = max((it.ended_s - it.asked_s for it in load.answers), default=0.0)
        for at_s in self.faults_s:
            if served := [it.ended_s for it in load.answers if it.is_right and it.asked_s >= at_s]:
                self.served_s.append(min(served) - at_s)

    def fault_now(self) -> float:
        """Notes that a fault is committed now, and when that is."""
        self.faults_s.append(time.monotonic())
        return self.faults_s[-1]

    @property
    def quarantined_too_soon(self) -> list[Answer]:
        """Those that were quarantined though fewer than two hosts died in their time."""
        return [it for it in self.quarantined if self._deaths_during(it) < 2]

    def _deaths_during(self, answer: Answer) -> int:
        return sum(it.began_s <= answer.ended_s and answer.asked_s <= it.ended_s for it in self.host_deaths)

    @property
    def slowest_known_s(self) -> float | None:
        return max(self.known_s, default=None)


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'fault':<34}{'rounds':>7}{'missed':>7}{'right':>7}{'moved':>6}{'errors':>7}{'given up':>9}{'wrong':>6}"
        f"{'dropped':>8}{'known p50':>10}{'p95':>6}{'max':>6}{'served p50':>11}{'max':>7}{'slowest':>8}{'s':>6} (ms)"
    ]
    for row in rows:
        counts = f"{row.rounds:>7}{row.missed:>7}{row.right:>7}{row.migrated:>6}"
        counts += f"{sum(row.errors.values()) + len(row.quarantined):>7}"
        counts += f"{row.given_up:>9}{len(row.wrong):>6}{row.dropped:>8}"
        known = [percentile(row.known_s, share) for share in (0.5, 0.95, 1)]
        served = [percentile(row.served_s, share) for share in (0.5, 1)]
        times = "".join(
            f"{_ms(time_s):>{width}}"
            for time_s, width in zip([*known, *served, row.slowest_answer_s], (10, 6, 6, 11, 7, 8), strict=True)
        )
        lines.append(f"{row.name:<34}{counts}{times}{row.seconds:>6.0f}")
        lines += [f"    {row.accepted} of {row.drafted} drafts right"] if row.drafted else []
        lines += [f"    {count} sessions failed: {cause}" for cause, count in sorted(row.sessions_failed.items())]
        lines += [f"    {count} errors: {error}" for error, count in Counter(row.errors).most_common()]
        lines += [f"    {len(row.quarantined)} quarantined: had lost two nodes"] if row.quarantined else []
        lines += [f"    wrong: {wrong}" for wrong in row.wrong]
    return "\n".join(lines)


def _ms(time_s: float | None) -> str:
    return "" if time_s is None else f"{time_s * 1e3:.0f}"
