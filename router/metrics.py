"""Metrics for Prometheus: the router's counts of ended requests, and the state of nodes, links and open requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.wire.messages import PoolStatus, Role
from router.cluster.cluster_index import ClusterIndex
from router.cluster.nodes import NodeEntry
from router.errors import NODE_CRASHED
from router.requests.lifecycle import RequestLifecycle
from router.requests.states import RequestPhase
from router.routing.decisions import Decision

NODE_LABELS = ("node", "role")
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 1.03, 1.1, 1.33, 2, 4, 10)
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RouterMetrics:
    """Counters of what clients asked and got. What nodes did, they count themselves: `ClusterCollector` shows it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests that ended", ["outcome"])
        self._responses = self._counter(
            "http_responses", "HTTP answers, refusals included", ["route", "status", "code"]
        )
        self._tokens = self._counter("tokens", "Tokens of requests that ended", ["kind"])
        self._migrations = self._counter("migrations", "Requests that went on on another decode node", [])
        self._drained = self._counter("drained_requests", "Requests of nodes that were drained, or left", ["outcome"])
        self._move_seconds = self._histogram("move_seconds", "Moves of running requests: no token comes meanwhile")
        self._quarantined = self._counter("quarantined_requests", "Requests that ended as node_crashed", [])
        self._waiting = Gauge(
            "headrace_requests_waiting_for_node",
            "Requests that have a place, and wait for a node that is busy or was lost",
            ["role"],
            registry=self.registry,
        )
        self._fell_behind = self._counter(
            "unread_answers", "Times that a node's stream was not read on because its client read too slowly", []
        )
        self._decisions = self._counter("routing_decisions", "Routing decisions", ["plan", "reason", "cause"])
        self._predictions = Histogram(
            "headrace_prediction_ratio",
            "Outcomes of routing decisions, divided by what the policy predicted",
            ["quantity"],
            buckets=RATIO_BUCKETS,
            registry=self.registry,
        )
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
        """Adds metrics that are read from nodes, open requests and the index at every scrape."""
        self.registry.register(ClusterCollector(nodes, phases, index))

    def http_response(self, route: str, status: int, code: str) -> None:
        """Counts an HTTP answer; `code` is the error's, empty for a success."""
        self._responses.labels(route, str(status), code).inc()

    def first_token(self, seconds: float) -> None:
        """Records a request's time to first token."""
        self._ttft.observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        """Records `count` tokens that came together, `seconds` after the last."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    def waiting_for_node(self, role: Role) -> AbstractContextManager[None]:
        """Counts a request as waiting for a node of this role."""
        return self._waiting.labels(role.value).track_inprogress()

    def reader_fell_behind(self) -> None:
        """Counts a pause in reading a node's stream, because of a client that reads too slowly."""
        self._fell_behind.inc()

    def decided(self, decision: Decision) -> None:
        """Counts a routing decision by its plan and reason."""
        self._decisions.labels(decision.plan_kind, decision.plan.reason, decision.cause).inc()

    def predicted(self, quantity: str, ratio: float) -> None:
        """Records an outcome divided by its prediction."""
        self._predictions.labels(quantity).observe(ratio)

    def request_ended(self, life: RequestLifecycle) -> None:
        """Counts a request that is done, failed or was abandoned by its client."""
        outcome = "completed" if life.phase is RequestPhase.DONE else "failed"
        if life.failure is not None and life.failure.code == "client_left":
            outcome = "cancelled"
        self._requests.labels(outcome).inc()
        if life.failure is not None and life.failure.code == NODE_CRASHED:
            self._quarantined.inc()
        num_prompt = life.request.num_prompt_tokens
        self._tokens.labels("prompt").inc(num_prompt)
        self._tokens.labels("cached").inc(life.report.cached_tokens(num_prompt))
        self._tokens.labels("generated").inc(len(life.generated))
        self._migrations.inc(life.report.migrations)

    def request_moved(self, seconds: float) -> None:
        """Records a move of a running request: no token comes in these seconds."""
        self._move_seconds.observe(seconds)

    def requests_drained(self, outcome: str, count: int) -> None:
        """Counts requests of a node that was drained, or has left."""
        self._drained.labels(outcome).inc(count)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class ClusterCollector(Collector):
    """Metrics read at each scrape: gauges of nodes, links and open requests, and the counters in nodes' heartbeats."""

    def __init__(
        self,
        nodes: Callable[[], Sequence[NodeEntry]],
        phases: Callable[[], dict[RequestPhase, int]],
        index: ClusterIndex,
    ) -> None:
        self._nodes = nodes
        self._phases = phases
        self._index = index

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        nodes = self._nodes()
        yield self._open_requests()
        yield from _node_gauges(nodes)
        yield from _load_gauges(nodes)
        yield from _link_gauges(nodes)
        yield from _node_counters(nodes)
        yield _overlap(nodes)
        yield _roles(nodes)
        yield from self._indexed(nodes)

    def _open_requests(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily("headrace_requests_open", "Requests by phase", labels=["phase"])
        for phase, count in self._phases().items():
            if phase not in (RequestPhase.DONE, RequestPhase.FAILED):
                family.add_metric([phase.value], count)
        return family

    def _indexed(self, nodes: Sequence[NodeEntry]) -> Iterator[GaugeMetricFamily]:
        """Sizes of the router's copy of each node's cache index."""
        keys = _gauge("index_keys", "Cached prefixes of a node in the router's index", "group")
        followed = _gauge("index_followed", "1 while a node's cache updates arrive")
        for node in nodes:
            known = self._index.get(node.id)
            if known is not None:
                keys.add_metric([*_labels_of(node), "attention"], known.num_blocks)
                keys.add_metric([*_labels_of(node), "state"], known.num_checkpoints)
                followed.add_metric(_labels_of(node), known.is_followed)
        yield from (keys, followed)


def _node_gauges(nodes: Sequence[NodeEntry]) -> Iterator[GaugeMetricFamily]:
    up = _gauge("node_up", "1 unless a call was lost")
    stalled = _gauge("node_stalled_seconds", "Seconds since the node's engine last made a turn while it has work")
    requests = _gauge("node_requests", "Requests on a node", "phase")
    calls = _gauge("node_calls", "Open calls on a node, by the router that made them", "router")
    pools = _gauge("pool_units", "Blocks and slots of a node", "pool", "use")
    indexed = _gauge("node_indexed", "Blocks and checkpoints of a node that a prompt can find", "group")
    tombstones = _gauge("node_tombstones", "Block boundaries of a node that have the block but no checkpoint")
    for node in nodes:
        labels, status = _labels_of(node), node.status
        up.add_metric(labels, 0 if node.suspect else 1)
        stalled.add_metric(labels, status.stalled_s)
        requests.add_metric([*labels, "running"], status.running)
        requests.add_metric([*labels, "waiting"], status.waiting)
        for router, count in status.calls.items():
            calls.add_metric([*labels, router], count)
        _add_pool(pools, [*labels, "blocks"], status.blocks)
        _add_pool(pools, [*labels, "slots"], status.slots)
        indexed.add_metric([*labels, "attention"], status.blocks.indexed)
        indexed.add_metric([*labels, "state"], status.slots.indexed)
        tombstones.add_metric(labels, status.blocks.indexed - status.slots.indexed)
    yield from (up, stalled, requests, calls, pools, indexed, tombstones)


def _load_gauges(nodes: Sequence[NodeEntry]) -> Iterator[GaugeMetricFamily]:
    decoding = _gauge("node_decoding", "Sequences of a node that generate, or whose state arrives for that")
    context = _gauge("node_context_tokens", "Tokens of the contexts of sequences that generate")
    waiting = _gauge("node_waiting_tokens", "Tokens of prompts that a node has yet to compute")
    costs = _gauge("node_step_cost_seconds", "Seconds of a node's steps by their contents, as it measures them", "part")
    for node in nodes:
        labels, status = _labels_of(node), node.status
        decoding.add_metric(labels, status.num_decoding)
        context.add_metric(labels, status.context_tokens)
        waiting.add_metric(labels, status.waiting_tokens)
        for name, seconds in asdict(status.costs).items():
            costs.add_metric([*labels, name.removesuffix("_s")], seconds)
    yield from (decoding, context, waiting, costs)


def _link_gauges(nodes: Sequence[NodeEntry]) -> Iterator[GaugeMetricFamily]:
    """`link_healthy` for every link, speed and round trip for those that were measured."""
    healthy = _gauge("link_healthy", "1 if the link to a peer was measured, and without a warning", "peer")
    speed = _gauge("link_bytes_per_second", "Measured speed of long messages to a peer", "peer")
    round_trip = _gauge("link_round_trip_seconds", "Measured round trip of a short message to a peer", "peer")
    for node in nodes:
        for link in node.status.links:
            labels = [*_labels_of(node), link.peer]
            healthy.add_metric(labels, link.bytes_per_s is not None and link.warning is None)
            if link.bytes_per_s is not None and link.round_trip_s is not None:
                speed.add_metric(labels, link.bytes_per_s)
                round_trip.add_metric(labels, link.round_trip_s)
    yield from (healthy, speed, round_trip)


def _node_counters(nodes: Sequence[NodeEntry]) -> Iterator[CounterMetricFamily]:
    """Counters of nodes: `x` becomes `headrace_node_x_total`. `cause=deadline,direction=sent/x` adds two labels, and
    `state/x` is short for `group=state/x`. All nodes give a counter the same labels."""
    families: dict[str, CounterMetricFamily] = {}
    for node in nodes:
        for counter, value in node.status.counters.items():
            prefix, _, name = counter.rpartition("/")
            labels = _counter_labels(prefix)
            if name not in families:
                text = "A counter of the node"
                families[name] = CounterMetricFamily(f"headrace_node_{name}", text, labels=[*NODE_LABELS, *labels])
            families[name].add_metric([*_labels_of(node), *labels.values()], value)
    yield from families.values()


def _overlap(nodes: Sequence[NodeEntry]) -> GaugeMetricFamily:
    """The hidden share of transfer seconds since a node's start, for nodes that have sent any."""
    ratio = _gauge(
        "node_transfer_overlap_ratio", "Share of the seconds of sent transfers in which the prompt was still computed"
    )
    for node in nodes:
        counters = node.status.counters
        keys = (f"direction=sent,group={group}/transfer_seconds" for group in ("attention", "state"))
        if seconds := sum(counters.get(key, 0.0) for key in keys):
            ratio.add_metric(_labels_of(node), counters.get("transfer_hidden_seconds", 0.0) / seconds)
    return ratio


def _roles(nodes: Sequence[NodeEntry]) -> GaugeMetricFamily:
    """The roles that nodes have now; on all other metrics `role` is the one with which the node started."""
    family = _gauge("node_role", "1 for the role that the node has now")
    for node in nodes:
        family.add_metric([node.info.name, node.role.value], 1)
    return family


def _counter_labels(prefix: str) -> dict[str, str]:
    """Labels of a counter's prefix, in the order of their names."""
    parts = (part.partition("=") for part in prefix.split(",") if part)
    return dict(sorted((name, value) if equals else ("group", name) for name, equals, value in parts))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"headrace_{name}", text, labels=[*NODE_LABELS, *labels])


def _labels_of(node: NodeEntry) -> list[str]:
    """The role is that of the node's start: a counter whose labels changed would begin anew."""
    return [node.info.name, node.info.role.value]


def _add_pool(family: GaugeMetricFamily, labels: list[str], pool: PoolStatus) -> None:
    for use in ("free", "cached", "in_use"):
        family.add_metric([*labels, use], getattr(pool, use))
