"""What /metrics says of now: read from nodes' heartbeats, open requests and the prefix index at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.events import Phase
from router.nodes import Node
from router.prefix_index import PrefixIndex
from wire.messages import PoolStatus

PLACE = ("node", "role")


class LiveMetrics(Collector):
    """Gauges, and the counters that nodes keep."""

    def __init__(
        self, nodes: Callable[[], Sequence[Node]], phases: Callable[[], dict[Phase, int]], index: PrefixIndex
    ) -> None:
        self._nodes = nodes
        self._phases = phases
        self._index = index

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        nodes = self._nodes()
        yield self._open_requests()
        yield from _node_gauges(nodes)
        yield from _node_counters(nodes)
        yield from self._indexed(nodes)

    def _open_requests(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily("headrace_requests_open", "Requests by phase", labels=["phase"])
        for phase, count in self._phases().items():
            if phase not in (Phase.DONE, Phase.FAILED):
                family.add_metric([phase.value], count)
        return family

    def _indexed(self, nodes: Sequence[Node]) -> Iterator[GaugeMetricFamily]:
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


def _node_gauges(nodes: Sequence[Node]) -> Iterator[GaugeMetricFamily]:
    up = _gauge("node_up", "1 unless a call was lost")
    requests = _gauge("node_requests", "Requests on a node", "phase")
    pools = _gauge("pool_units", "Blocks and slots of a node", "pool", "use")
    indexed = _gauge("node_indexed", "Blocks and checkpoints of a node that a prompt can find", "group")
    placeholders = _gauge("node_placeholders", "Block boundaries of a node that have the block but no checkpoint")
    for node in nodes:
        place, status = _place(node), node.status
        up.add_metric(place, 0 if node.suspect else 1)
        requests.add_metric([*place, "running"], status.running)
        requests.add_metric([*place, "waiting"], status.waiting)
        _add_pool(pools, [*place, "blocks"], status.blocks)
        _add_pool(pools, [*place, "slots"], status.slots)
        indexed.add_metric([*place, "attention"], status.blocks.indexed)
        indexed.add_metric([*place, "state"], status.slots.indexed)
        placeholders.add_metric(place, status.blocks.indexed - status.slots.indexed)
    yield from (up, requests, pools, indexed, placeholders)


def _node_counters(nodes: Sequence[Node]) -> Iterator[CounterMetricFamily]:
    """A node's counter `x` is `headrace_node_x_total`; its counter `state/x` has the label group="state"."""
    families: dict[str, CounterMetricFamily] = {}
    for node in nodes:
        for counter, value in node.status.counters.items():
            group, _, name = counter.rpartition("/")
            if name not in families:
                labels = [*PLACE, "group"] if group else PLACE
                families[name] = CounterMetricFamily(f"headrace_node_{name}", "Counted by the node", labels=labels)
            families[name].add_metric([*_place(node), *([group] if group else [])], value)
    yield from families.values()


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"headrace_{name}", text, labels=[*PLACE, *labels])


def _place(node: Node) -> list[str]:
    return [node.info.name, node.info.role.value]


def _add_pool(family: GaugeMetricFamily, labels: list[str], pool: PoolStatus) -> None:
    for use in ("free", "cached", "in_use"):
        family.add_metric([*labels, use], getattr(pool, use))
