"""What /metrics says: the router's own counts, and what nodes report with their heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.cluster.cluster_index import ClusterIndex
from router.cluster.nodes import NodeEntry
from router.live_metrics import LiveMetrics
from router.requests.events import RequestPhase
from router.requests.lifecycle import RequestLife

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RouterMetrics:
    """Counts of finished requests and their tokens; hits are counted per group, node and role.

    A decode node whose state arrives by transfer never looks its state groups up: those requests are in
    `headrace_skipped_state_groups_total`, not among the misses.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        place = ["node", "role"]
        self._requests = self._counter("requests", "Requests that ended", ["outcome"])
        self._tokens = self._counter("tokens", "Tokens of requests that ended", ["kind"])
        group = [*place, "group"]
        self._lookups = self._counter("lookups", "Prompts looked up in a cache group of a node", group)
        self._looked_up = self._counter("looked_up_tokens", "Prompt tokens of these lookups", group)
        self._hits = self._counter("hit_tokens", "Prompt tokens found in a cache group of a node", group)
        self._skipped = self._counter("skipped_state_groups", "Prompts looked up among attention blocks only", place)
        self._bytes = self._counter("transfer_bytes", "Bytes handed over", ["kind"])
        self._seconds = self._counter("transfer_seconds", "Time that hand-overs took", [])
        self._migrations = self._counter("migrations", "Decode nodes lost under a request", [])
        self._ttft = self._histogram("time_to_first_token_seconds", "From the request to its first token")
        self._itl = self._histogram("inter_token_seconds", "Between two tokens of a request")

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"headrace_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"headrace_{name}", text, buckets=LATENCY_BUCKETS_S, registry=self.registry)

    def watch(
        self,
        nodes: Callable[[], Sequence[NodeEntry]],
        phases: Callable[[], dict[RequestPhase, int]],
        index: ClusterIndex,
    ) -> None:
        """Reads nodes, open requests and the index anew at every scrape."""
        self.registry.register(LiveMetrics(nodes, phases, index))

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        """`count` tokens came together, `seconds` after those before."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    def request_ended(self, life: RequestLife) -> None:
        outcome = "completed" if life.phase is RequestPhase.DONE else "failed"
        if life.failure is not None and life.failure.code == "client_left":
            outcome = "cancelled"
        self._requests.labels(outcome).inc()
        num_prompt = life.request.num_prompt_tokens
        self._tokens.labels("prompt").inc(num_prompt)
        self._tokens.labels("cached").inc(life.report.cached_tokens(num_prompt))
        self._tokens.labels("generated").inc(len(life.generated))
        self._migrations.inc(life.report.migrations)
        if (prefill := life.report.prefill) is not None:
            place = (prefill.node, "prefill")
            self._looked(place, "attention", num_prompt, prefill.attention_hit_tokens)
            self._looked(place, "state", num_prompt, prefill.state_hit_tokens)
        if (decode := life.report.decode) is not None:
            place = (decode.node, "decode")
            self._looked(place, "attention", num_prompt, decode.attention_hit_tokens)
            if decode.state == "received":
                self._skipped.labels(*place).inc()
            else:
                self._looked(place, "state", num_prompt, decode.state_hit_tokens)
        if (transfer := life.report.transfer) is not None:
            self._bytes.labels("attention").inc(transfer.attention_bytes)
            self._bytes.labels("state").inc(transfer.state_bytes)
            self._seconds.inc(transfer.seconds)

    def _looked(self, place: tuple[str, str], group: str, num_prompt: int, hit_tokens: int) -> None:
        self._lookups.labels(*place, group).inc()
        self._looked_up.labels(*place, group).inc(num_prompt)
        self._hits.labels(*place, group).inc(hit_tokens)

    def hits(self) -> list[dict[str, Any]]:
        """For /cluster: hit tokens per node and group, with the tokens looked up there."""
        looked_up = {tuple(sample.labels.values()): sample.value for sample in _totals(self._looked_up)}
        return [
            {
                **sample.labels,
                "hit_tokens": int(sample.value),
                "looked_up_tokens": int(looked_up[tuple(sample.labels.values())]),
            }
            for sample in _totals(self._hits)
        ]

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


def _totals(counter: Counter) -> Iterator[Any]:
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield sample
