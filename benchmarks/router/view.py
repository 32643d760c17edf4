"""The router's view of simulated nodes: its real index, ledger and snapshots, fed by heartbeats and late events."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from benchmarks.router.events import Events
from benchmarks.router.node import SimulatedNode
from benchmarks.router.workload import Arrival
from headrace.cache.events import BlockEvicted, BlockStored, CacheEvent, CheckpointEvicted, CheckpointStored
from headrace.cache.hits import PrefixHit
from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.cache.pools import PoolCounts
from headrace.cache.types import PrefixKey
from headrace.step_costs import PROMPT_SECONDS
from headrace.wire.cache_updates import CacheChange, CacheChanges, CacheSnapshotPart
from headrace.wire.node_messages import LinkStatus, NodeInfo, NodeStatus, PoolStatus, Role
from router.cluster.cluster_index import ClusterIndex, NodeIndex
from router.routing.candidates import Candidate, LinkCosts
from router.routing.ledger import Ledger
from router.routing.snapshots import Snapshots

CHANGES = {
    BlockStored: CacheChange.BLOCK_STORED,
    BlockEvicted: CacheChange.BLOCK_EVICTED,
    CheckpointStored: CacheChange.CHECKPOINT_STORED,
    CheckpointEvicted: CacheChange.CHECKPOINT_EVICTED,
}


Changes = tuple[tuple[CacheChange, PrefixKey], ...]


class Feed:
    """One node's cache events on their way to the index; `pending` are those of all nodes, in order of time."""

    def __init__(self, index: NodeIndex, clock: Events, pending: deque[tuple[float, Feed, Changes]]) -> None:
        self._index = index
        self._clock = clock
        self._sequence = 0
        self._pending = pending
        index.apply(CacheSnapshotPart(1, 0, (), (), is_last=True))

    def add(self, events: Sequence[CacheEvent]) -> None:
        changes = tuple([(CHANGES[type(event)], event.key) for event in events])
        self._pending.append((self._clock.now_s, self, changes))

    def apply(self, changes: Changes) -> None:
        """Takes over what has arrived."""
        self._index.apply(CacheChanges(1, self._sequence + 1, changes))
        self._sequence += len(changes)


class RouterView:
    """Candidates for each request.

    index_delay_s   until the router knows of a block or a checkpoint that a node has published
    """

    def __init__(self, *, is_elastic: bool, is_hybrid: bool, link: LinkCosts, index_delay_s: float) -> None:
        self.ledger = Ledger()
        self._index = ClusterIndex()
        self._snapshots = Snapshots(self._index, self.ledger, roles_are_fixed=not is_elastic)
        self._is_hybrid = is_hybrid
        self._link = link
        self._index_delay_s = index_delay_s
        self._nodes: list[SimulatedNode] = []
        self._infos: list[NodeInfo] = []
        self._pending: deque[tuple[float, Feed, Changes]] = deque()
        self._links: tuple[LinkStatus, ...] = ()

    def feed(self, name: str, block_size: int, clock: Events) -> Feed:
        """The way of a new node's cache events to the index."""
        return Feed(self._index.add((name, 1), block_size), clock, self._pending)

    def register(self, nodes: Sequence[SimulatedNode]) -> None:
        """Takes the nodes of the cluster, sorted by name."""
        self._nodes = list(nodes)
        self._infos = [_info(node) for node in nodes]
        self._roles = {node.name: node.role for node in nodes}
        self._links = tuple(
            LinkStatus(node.name, bytes_per_s=self._link.bytes_per_s, round_trip_s=self._link.latency_s)
            for node in nodes
        )

    def heartbeat(self, now_s: float) -> Mapping[str, tuple[Role, NodeStatus]]:
        """All nodes report. Returns the role and the status of each."""
        reports = {}
        for node, info in zip(self._nodes, self._infos, strict=True):
            status = _status(node, self._links)
            self._snapshots.heartbeat(info, status, now_s)
            reports[node.name] = (self._roles[node.name], status)
        return reports

    def switch(self, name: str, role: Role) -> None:
        """Changes a node's role for the requests to come."""
        self._roles = {**self._roles, name: role}

    def catch_up(self, now_s: float) -> None:
        """Takes over the cache events that have arrived by now."""
        pending, sent_by_s = self._pending, now_s - self._index_delay_s
        while pending and pending[0][0] <= sent_by_s:
            _, feed, changes = pending.popleft()
            feed.apply(changes)

    @property
    def caches_are_short(self) -> bool:
        return self._snapshots.caches_are_short(self._roles)

    def candidates(self, arrival: Arrival, now_s: float, avoided: Collection[str] = ()) -> Sequence[Candidate]:
        """The real snapshot; for a model of attention alone every block is one from which a node can resume."""
        keys = {self._nodes[0].shape.block_size: arrival.keys}
        found = self._snapshots.take(self._roles, keys, arrival.num_tokens, now_s, avoided=avoided)
        return found if self._is_hybrid else [_without_states(each) for each in found]


def _without_states(candidate: Candidate) -> Candidate:
    found = candidate.hit.attention_tokens
    return candidate.with_hit(PrefixHit(found, found, found)) if found else candidate


def _info(node: SimulatedNode) -> NodeInfo:
    shape = node.shape
    # One attention layer and head, of as many bytes a token as the shape says, and a state of one number.
    layout = CacheLayout(
        "simulated", "float16", "float32", shape.block_size, (AttentionGroup(1, 1, shape.bytes_per_token // 4),),
        (StateGroup(1, rec_shape=(shape.state_bytes // 4,)),),
    )  # fmt: skip
    return NodeInfo(
        node.name, node.role, 1, "", "", layout, 1 << 20, shape.num_blocks, shape.num_slots, 1, "cuda", 1 << 20, 2,
        max_step_tokens=shape.max_step_tokens,
    )  # fmt: skip


def _status(node: SimulatedNode, links: tuple[LinkStatus, ...]) -> NodeStatus:
    stats = node.cache.stats()
    load = node.load(stats)
    return NodeStatus(
        running=node.num_running,
        waiting=node.num_waiting,
        counters={PROMPT_SECONDS: node.prompt_s, **node.counted},
        blocks=_pool(stats.blocks, stats.num_indexed_blocks),
        slots=_pool(stats.slots, stats.num_checkpoints),
        links=links,
        waiting_tokens=load.waiting_tokens,
        costs=node.shape.costs,
        num_decoding=load.num_decoding,
        context_tokens=load.context_tokens,
        waiting_depths=load.waiting_depths,
        waiting_lengths=load.waiting_lengths,
    )


def _pool(counts: PoolCounts, num_indexed: int) -> PoolStatus:
    total = counts.free + counts.cached + counts.in_use
    return PoolStatus(total, counts.free, counts.cached, counts.in_use, num_indexed)
