"""What /metrics says of now: read from nodes' heartbeats, open requests and the prefix index at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.wire.messages import PoolStatus
from router.cluster.cluster_index import ClusterIndex
from router.cluster.nodes import NodeEntry
from router.requests.events import RequestPhase

PLACE = ("node", "role")


class LiveMetrics(Collector):
    """Gauges, and the counters that nodes keep."""

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
        yield from _link_gauges(nodes)
        yield from _node_counters(nodes)
        yield _overlap(nodes)
        yield from self._indexed(nodes)

    def _open_requests(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily("headrace_requests_open", "Requests by phase", labels=["phase"])
        for phase, count in self._phases().items():
            if phase not in (RequestPhase.DONE, RequestPhase.FAILED):
                family.add_metric([phase.value], count)
        return family

    def _indexed(self, nodes: Sequence[NodeEntry]) -> Iterator[GaugeMetricFamily]:
        """What the router knows of the nodes' caches, beside what they hold."""
        keys = _gauge("index_keys", "Prefixes of a node that the router knows of", "group")
        followed = _gauge("index_followed", "1 while a node's cache updates arrive")
        for node in nodes:
            known = self._index.get(node.id)
            if known is not None:
                keys.add_metric([*_place(node), "attention"], known.num_blocks)
                keys.add_metric([*_place(node), "state"], known.num_checkpoints)
                followed.add_metric(_place(node), known.is_followed)
        yield from (keys, followed)


def _node_gauges(nodes: Sequence[NodeEntry]) -> Iterator[GaugeMetricFamily]:
    up = _gauge("node_up", "1 unless a call was lost")
    requests = _gauge("node_requests", "Requests on a node", "phase")
    pools = _gauge("pool_units", "Blocks and slots of a node", "pool", "use")
    indexed = _gauge("node_indexed", "Blocks and checkpoints of a node that a prompt can find", "group")
    tombstones = _gauge("node_tombstones", "Block boundaries of a node that have the block but no checkpoint")
    for node in nodes:
        place, status = _place(node), node.status
        up.add_metric(place, 0 if node.suspect else 1)
        requests.add_metric([*place, "running"], status.running)
        requests.add_metric([*place, "waiting"], status.waiting)
        _add_pool(pools, [*place, "blocks"], status.blocks)
        _add_pool(pools, [*place, "slots"], status.slots)
        indexed.add_metric([*place, "attention"], status.blocks.indexed)
        indexed.add_metric([*place, "state"], status.slots.indexed)
        tombstones.add_metric(place, status.blocks.indexed - status.slots.indexed)
    yield from (up, requests, pools, indexed, tombstones)


def _link_gauges(nodes: Sequence[NodeEntry]) -> Iterator[GaugeMetricFamily]:
    """Of links that are measured; `link_healthy` of all."""
    healthy = _gauge("link_healthy", "1 if the way to a peer works and nothing about it needs looking into", "peer")
    speed = _gauge("link_bytes_per_second", "Measured speed of long messages to a peer", "peer")
    round_trip = _gauge("link_round_trip_seconds", "Measured round trip of a short message to a peer", "peer")
    for node in nodes:
        for link in node.status.links:
            labels = [*_place(node), link.peer]
            healthy.add_metric(labels, link.bytes_per_s is not None and link.warning is None)
            if link.bytes_per_s is not None and link.round_trip_s is not None:
                speed.add_metric(labels, link.bytes_per_s)
                round_trip.add_metric(labels, link.round_trip_s)
    yield from (healthy, speed, round_trip)


def _node_counters(nodes: Sequence[NodeEntry]) -> Iterator[CounterMetricFamily]:
    """A node's counter `x` is `headrace_node_x_total`; `cause=deadline,direction=sent/x` has these two labels more, and
    `state/x` is short for `group=state/x`. All nodes give one name the same labels."""
    families: dict[str, CounterMetricFamily] = {}
    for node in nodes:
        for counter, value in node.status.counters.items():
            prefix, _, name = counter.rpartition("/")
            labels = _labels(prefix)
            if name not in families:
                text = "Counted by the node"
                families[name] = CounterMetricFamily(f"headrace_node_{name}", text, labels=[*PLACE, *labels])
            families[name].add_metric([*_place(node), *labels.values()], value)
    yield from families.values()


def _overlap(nodes: Sequence[NodeEntry]) -> GaugeMetricFamily:
    """Since the nodes' start; of nodes that have handed over."""
    ratio = _gauge("node_transfer_overlap_ratio", "Share of the seconds of sent hand-overs while the prompt computed")
    for node in nodes:
        counters = node.status.counters
        keys = (f"direction=sent,group={group}/transfer_seconds" for group in ("attention", "state"))
        if seconds := sum(counters.get(key, 0.0) for key in keys):
            ratio.add_metric(_place(node), counters.get("transfer_hidden_seconds", 0.0) / seconds)
    return ratio


def _labels(prefix: str) -> dict[str, str]:
    """In the order of their names, however a node wrote them."""
    parts = (part.partition("=") for part in prefix.split(",") if part)
    return dict(sorted((name, value) if equals else ("group", name) for name, equals, value in parts))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"headrace_{name}", text, labels=[*PLACE, *labels])


def _place(node: NodeEntry) -> list[str]:
    return [node.info.name, node.info.role.value]


def _add_pool(family: GaugeMetricFamily, labels: list[str], pool: PoolStatus) -> None:
    for use in ("free", "cached", "in_use"):
        family.add_metric([*labels, use], getattr(pool, use))
