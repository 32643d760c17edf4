"""What /metrics says: the router's own counts, and what nodes report with their heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.events import Phase
from router.lifecycle import RequestLife
from router.nodes import Node
from wire.messages import PoolStatus

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
        self._lookups = self._counter("lookups", "Prompts looked up in a node's cache", place)
        self._looked_up = self._counter("looked_up_tokens", "Prompt tokens of these lookups", place)
        self._hits = self._counter("hit_tokens", "Prompt tokens found in a node's cache", [*place, "group"])
        self._skipped = self._counter("skipped_state_groups", "Lookups of attention blocks only", place)
        self._bytes = self._counter("transfer_bytes", "Bytes handed over", ["kind"])
        self._seconds = self._counter("transfer_seconds", "Time that hand-overs took", [])
        self._migrations = self._counter("migrations", "Decode nodes lost under a request", [])
        self._ttft = self._histogram("time_to_first_token_seconds", "From the request to its first token")
        self._itl = self._histogram("inter_token_seconds", "Between two tokens of a request")

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"headrace_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"headrace_{name}", text, buckets=LATENCY_BUCKETS_S, registry=self.registry)

    def watch(self, nodes: Callable[[], Sequence[Node]], phases: Callable[[], dict[Phase, int]]) -> None:
        """Reads nodes and open requests anew at every scrape."""
        self.registry.register(_Live(nodes, phases))

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        """`count` tokens came together, `seconds` after those before."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    def request_ended(self, life: RequestLife) -> None:
        outcome = "completed" if life.phase is Phase.DONE else "failed"
        if life.failure is not None and life.failure.code == "client_left":
            outcome = "cancelled"
        self._requests.labels(outcome).inc()
        num_prompt = life.request.num_prompt_tokens
        self._tokens.labels("prompt").inc(num_prompt)
        self._tokens.labels("cached").inc(life.report.cached_tokens(num_prompt))
        self._tokens.labels("generated").inc(len(life.generated))
        self._migrations.inc(life.report.migrations)
        if (prefill := life.report.prefill) is not None:
            self._looked(prefill.node, "prefill", num_prompt, prefill.attention_hit_tokens)
            self._hits.labels(prefill.node, "prefill", "state").inc(prefill.state_hit_tokens)
        if (decode := life.report.decode) is not None:
            self._looked(decode.node, "decode", num_prompt, decode.attention_hit_tokens)
            if decode.state == "received":
                self._skipped.labels(decode.node, "decode").inc()
            else:
                self._hits.labels(decode.node, "decode", "state").inc(decode.state_hit_tokens)
        if (transfer := life.report.transfer) is not None:
            self._bytes.labels("attention").inc(transfer.attention_bytes)
            self._bytes.labels("state").inc(transfer.state_bytes)
            self._seconds.inc(transfer.seconds)

    def _looked(self, node: str, role: str, num_prompt: int, attention_hit_tokens: int) -> None:
        self._lookups.labels(node, role).inc()
        self._looked_up.labels(node, role).inc(num_prompt)
        self._hits.labels(node, role, "attention").inc(attention_hit_tokens)

    def hits(self) -> list[dict[str, Any]]:
        """For /cluster: hit tokens per node and group, with the tokens looked up there."""
        looked_up = {
            (sample.labels["node"], sample.labels["role"]): sample.value for sample in _totals(self._looked_up)
        }
        return [
            {
                "node": sample.labels["node"],
                "role": sample.labels["role"],
                "group": sample.labels["group"],
                "hit_tokens": int(sample.value),
                "looked_up_tokens": int(looked_up[sample.labels["node"], sample.labels["role"]]),
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


class _Live(Collector):
    """Gauges and node counters, read at each scrape."""

    def __init__(self, nodes: Callable[[], Sequence[Node]], phases: Callable[[], dict[Phase, int]]) -> None:
        self._nodes = nodes
        self._phases = phases

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        phases = GaugeMetricFamily("headrace_requests_open", "Requests by phase", labels=["phase"])
        for phase, count in self._phases().items():
            if phase not in (Phase.DONE, Phase.FAILED):
                phases.add_metric([phase.value], count)
        yield phases
        nodes = self._nodes()
        yield from self._pools(nodes)
        yield from self._counters(nodes)

    def _pools(self, nodes: Sequence[Node]) -> Iterator[GaugeMetricFamily]:
        up = GaugeMetricFamily("headrace_node_up", "1 unless a call was lost", labels=["node", "role"])
        requests = GaugeMetricFamily("headrace_node_requests", "Requests on a node", labels=["node", "role", "phase"])
        pools = GaugeMetricFamily(
            "headrace_pool_units", "Blocks and slots of a node", labels=["node", "role", "pool", "use"]
        )
        for node in nodes:
            place = [node.info.name, node.info.role.value]
            up.add_metric(place, 0 if node.suspect else 1)
            requests.add_metric([*place, "running"], node.status.running)
            requests.add_metric([*place, "waiting"], node.status.waiting)
            _add_pool(pools, [*place, "blocks"], node.status.blocks)
            _add_pool(pools, [*place, "slots"], node.status.slots)
        yield from (up, requests, pools)

    def _counters(self, nodes: Sequence[Node]) -> Iterator[CounterMetricFamily]:
        """A node's counter `x` is `headrace_node_x_total`."""
        families: dict[str, CounterMetricFamily] = {}
        for node in nodes:
            for name, value in node.status.counters.items():
                if name not in families:
                    families[name] = CounterMetricFamily(
                        f"headrace_node_{name}", "Counted by the node", labels=["node", "role"]
                    )
                families[name].add_metric([node.info.name, node.info.role.value], value)
        yield from families.values()


def _add_pool(family: GaugeMetricFamily, labels: list[str], pool: PoolStatus) -> None:
    for use in ("free", "cached", "in_use"):
        family.add_metric([*labels, use], getattr(pool, use))
