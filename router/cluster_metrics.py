"""Metrics of nodes, links and open requests for Prometheus, read from the router's tables at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.wire.node_messages import PoolStatus
from router.cluster.cluster_index import ClusterIndex
from router.cluster.nodes import NodeEntry
from router.node_counters import text_of
from router.requests.states import RequestPhase

NODE_LABELS = ("node", "role")


class ClusterCollector(Collector):
    """Metrics read at each scrape: gauges of nodes, links and open requests, and the counters in nodes' heartbeats."""

    def __init__(
        self,
        nodes: Callable[[], Sequence[NodeEntry]],
        phases: Callable[[], dict[RequestPhase, int]],
        index: ClusterIndex,
        is_ready: Callable[[], bool],
    ) -> None:
        self._nodes = nodes
        self._phases = phases
        self._index = index
        self._is_ready = is_ready

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        nodes = self._nodes()
        yield GaugeMetricFamily("headrace_ready", "1 while a node generates answers, as /ready says", self._is_ready())
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
                families[name] = CounterMetricFamily(
                    f"headrace_node_{name}", text_of(name), labels=[*NODE_LABELS, *labels]
                )
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
