"""The figures of a simulated run: tokens served from caches, waits, gaps and goodput, as rows of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.router.cluster import Outcome, SimulatedCluster

FIRST_TOKEN_S = 30.0
GAPS_S = (0.1, 0.2, 0.3)
LONGEST_SHARE = 0.1
SHORT_TOKENS = 2048
"""Mooncake's measure (FAST'25): a first token within 30 s, and the mean of the longest tenth of a request's gaps."""


@dataclass(frozen=True)
class Percentiles:
    """Mean and percentiles of some seconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float] | np.ndarray) -> Percentiles:
        """NaN of nothing."""
        if not len(seconds):
            return cls(*[float("nan")] * 4)
        return cls(float(np.mean(seconds)), *(float(each) for each in np.percentile(seconds, (50, 95, 99))))


@dataclass(frozen=True)
class Result:
    """A run's figures over the requests that ended in its steady part.

    requests_per_s     counts each request by its share of time in the steady part, as `cached_share` does
    cached_share       of prompt tokens, those that no node had to compute
    foreseen_share     of requests, those whose cached tokens were predicted within a block
    first_of_short     first tokens of prompts of at most SHORT_TOKENS, and `first_of_long` of the others
    tpot               seconds a token after the first, of each request
    gaps               between two tokens, of all requests
    goodput            shares of requests within `FIRST_TOKEN_S` and each of `GAPS_S`; a refused one is not
    busy               share of time in steps, of nodes of each role
    """

    requests: int
    refused: int
    requests_per_s: float
    cached_share: float
    foreseen_share: float
    first: Percentiles
    first_of_short: Percentiles
    first_of_long: Percentiles
    first_turns: Percentiles
    later_turns: Percentiles
    tpot: Percentiles
    gaps: Percentiles
    goodput: Sequence[float]
    busy: dict[str, float]
    tokens_a_step: float
    simulated_per_s: float

    @classmethod
    def of(cls, cluster: SimulatedCluster, cpu_s: float) -> Result:
        """The figures of a cluster that has run, which took `cpu_s` of this computer's time."""
        part = cluster.workload.steady_part(cluster.events.now_s)
        all_served = [each for each in cluster.outcomes if each.plan is not None]
        shares = np.array([part.share_of(each.arrival.at_s, each.end_s) for each in all_served])
        num_prompt = shares @ np.array([each.arrival.num_tokens for each in all_served])
        num_computed = shares @ np.array([each.computed_tokens for each in all_served])
        outcomes = [each for each in cluster.outcomes if part.start_s <= each.end_s <= part.end_s]
        served = [each for each in outcomes if each.plan is not None]
        lengths = np.array([each.arrival.num_tokens for each in served])
        turns = np.array([each.arrival.turn for each in served])
        gaps = _Gaps(cluster)
        waits = np.array([gaps.shown_s(each) - each.arrival.at_s for each in served])
        of_requests = [gaps.of(each) for each in served if each.arrival.answer_tokens > 1]
        all_gaps = np.concatenate([np.repeat(seconds, counts) for seconds, counts in of_requests] or [np.empty(0)])
        longest = iter([_mean_of_longest(*each) for each in of_requests])
        worst = np.array([next(longest) if each.arrival.answer_tokens > 1 else 0.0 for each in served])
        block = cluster.arrangement.shape.block_size
        return cls(
            requests=len(served),
            refused=len(outcomes) - len(served),
            requests_per_s=float(shares.sum()) / max(part.seconds, 1e-9),
            cached_share=1 - float(num_computed) / (float(num_prompt) or 1),
            foreseen_share=sum(each.misjudged_tokens < block for each in served) / max(len(served), 1),
            first=Percentiles.of(waits),
            first_of_short=Percentiles.of(waits[lengths <= SHORT_TOKENS]),
            first_of_long=Percentiles.of(waits[lengths > SHORT_TOKENS]),
            first_turns=Percentiles.of(waits[turns == 0]),
            later_turns=Percentiles.of(waits[turns > 0]),
            tpot=Percentiles.of([each.tpot_s for each in served if each.arrival.answer_tokens > 1]),
            gaps=Percentiles.of(all_gaps),
            goodput=[
                float(np.sum((waits <= FIRST_TOKEN_S) & (worst <= gap_s))) / max(len(outcomes), 1) for gap_s in GAPS_S
            ],
            busy=_busy(cluster),
            tokens_a_step=_tokens_a_step(cluster),
            simulated_per_s=len(cluster.outcomes) / cpu_s,
        )


class _Gaps:
    """The gaps of each request: the strides of its decode node while it was there, and its hand-over.

    Where a token gap is asked for, the first token of a prompt that is handed over is shown with the second.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._holds_first = cluster.objectives.token_gap_s is not None
        self._tokens = [np.array(node.strides.tokens, dtype=np.int64) for node in cluster.nodes]
        self._steps = [node.strides.steps for node in cluster.nodes]
        self._seconds = [np.array(node.strides.seconds) for node in cluster.nodes]

    def of(self, outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and how many gaps last that long."""
        own = slice(outcome.first_stride, outcome.last_stride)
        counts = self._tokens[outcome.decode_node][own]
        seconds = self._seconds[outcome.decode_node][own] / counts
        moved_s = outcome.decoding_s - outcome.first_s
        if moved_s <= 0:
            return seconds, counts
        first = np.array([0.0 if self._holds_first else seconds[0] + moved_s])
        return np.concatenate((first, seconds)), np.concatenate(([1, counts[0] - 1], counts[1:]))

    def shown_s(self, outcome: Outcome) -> float:
        """When the client gets the first token."""
        if not self._holds_first or outcome.decoding_s <= outcome.first_s or outcome.arrival.answer_tokens < 2:
            return outcome.first_s
        node, stride = outcome.decode_node, outcome.first_stride
        return float(outcome.decoding_s + self._seconds[node][stride] / self._steps[node][stride])


def _mean_of_longest(seconds: np.ndarray, counts: np.ndarray) -> float:
    """The mean of the longest tenth, of one gap at least."""
    order = np.argsort(seconds)[::-1]
    seconds, counts = seconds[order], counts[order]
    reached = counts.cumsum()
    wanted = max(int(LONGEST_SHARE * int(reached[-1])), 1)
    whole = int(np.searchsorted(reached, wanted))  # all gaps of the first so many, and some of the next
    left = wanted - (int(reached[whole - 1]) if whole else 0)
    return float(seconds[:whole] @ counts[:whole] + seconds[whole] * left) / wanted


def _busy(cluster: SimulatedCluster) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for node in cluster.nodes:
        shares.setdefault(node.role.value, []).append(node.busy_s / max(cluster.events.now_s, 1e-9))
    return {role: sum(each) / len(each) for role, each in shares.items()}


def _tokens_a_step(cluster: SimulatedCluster) -> float:
    """Tokens of an answer in a step: one, and the drafts that are right."""
    counted = sum((node.counted for node in cluster.nodes), Counter())
    return counted["sampled_tokens"] / max(1, counted["sampled_tokens"] - counted["accepted_tokens"])


HEADER = (
    "workload", "speed", "nodes", "policy", "cached %", "foreseen %", "req/s", "refused",
    "first token mean / p50 / p99 s", "short p50 / p95 s", "long p50 / p95 s", "TPOT p50 / p99 ms",
    "gap p50 / p95 / p99 ms", "within 100 / 200 / 300 ms %", "busy %", "simulated req/s",
)  # fmt: skip


def cells(result: Result) -> Sequence[str]:
    """The columns of `HEADER` from `cached %` on."""
    first, tpot, gaps = result.first, result.tpot, result.gaps
    return (
        f"{100 * result.cached_share:.1f}",
        f"{100 * result.foreseen_share:.1f}",
        f"{result.requests_per_s:.2f}",
        f"{result.refused}",
        f"{first.mean:.3f} / {first.p50:.3f} / {first.p99:.2f}",
        f"{result.first_of_short.p50:.3f} / {result.first_of_short.p95:.3f}",
        f"{result.first_of_long.p50:.3f} / {result.first_of_long.p95:.3f}",
        f"{1e3 * tpot.p50:.1f} / {1e3 * tpot.p99:.1f}",
        f"{1e3 * gaps.p50:.1f} / {1e3 * gaps.p95:.1f} / {1e3 * gaps.p99:.1f}",
        " / ".join(f"{100 * each:.1f}" for each in result.goodput),
        ", ".join(f"{role} {100 * share:.0f}" for role, share in result.busy.items()),
        f"{result.simulated_per_s:,.0f}",
    )
