"""A node's pools and counters as it reports them with every heartbeat."""

from __future__ import annotations

from dataclasses import asdict

from cache.pools import PoolCounts
from cache.stats import CacheCounters
from engine.build import BuiltEngine
from wire.cache_updates import CACHE_CHANGES
from wire.messages import NodeStatus, PoolStatus

_GROUPED = {
    "lookups": "attention/lookups",
    "looked_up_tokens": "attention/looked_up_tokens",
    "attention_hit_tokens": "attention/hit_tokens",
    "block_evictions": "attention/evictions",
    "state_lookups": "state/lookups",
    "state_looked_up_tokens": "state/looked_up_tokens",
    "state_hit_tokens": "state/hit_tokens",
    "checkpoints_evicted": "state/evictions",
}


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
            **cache_counters(stats.totals),
            "computed_tokens": engine.computed_tokens,
            "sampled_tokens": engine.sampled_tokens,
            CACHE_CHANGES: built.journal.sequence,
            "preemptions": engine.preemptions,
            "recomputed_tokens": engine.recomputed_tokens,
        },
    )


def cache_counters(totals: CacheCounters) -> dict[str, float]:
    """By metric name, `group/name` where each cache group has its own count."""
    return {_GROUPED.get(name, name): float(value) for name, value in asdict(totals).items()}


def _pool(counts: PoolCounts, num_indexed: int) -> PoolStatus:
    total = counts.free + counts.cached + counts.in_use
    return PoolStatus(
        total=total, free=counts.free, cached=counts.cached, in_use=counts.in_use, indexed=num_indexed
    )
