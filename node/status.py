"""A node's pools and counters as it reports them with every heartbeat."""

from __future__ import annotations

from dataclasses import asdict

from cache.pools import PoolCounts
from engine.build import BuiltEngine
from wire.cache_updates import CACHE_CHANGES
from wire.messages import NodeStatus, PoolStatus


def node_status(built: BuiltEngine) -> NodeStatus:
    """In the engine's thread only."""
    engine = built.engine
    stats = engine.cache.stats()
    return NodeStatus(
        running=engine.num_running,
        waiting=engine.num_waiting,
        blocks=_pool(stats.blocks, stats.num_indexed_blocks),
        slots=_pool(stats.slots, stats.num_checkpoints),
        counters={
            **{name: float(value) for name, value in asdict(stats.totals).items()},
            "computed_tokens": engine.computed_tokens,
            "sampled_tokens": engine.sampled_tokens,
            CACHE_CHANGES: built.journal.sequence,
            "preemptions": engine.preemptions,
            "recomputed_tokens": engine.recomputed_tokens,
        },
    )


def _pool(counts: PoolCounts, num_indexed: int) -> PoolStatus:
    total = counts.free + counts.cached + counts.in_use
    return PoolStatus(
        total=total, free=counts.free, cached=counts.cached, in_use=counts.in_use, indexed=num_indexed
    )
