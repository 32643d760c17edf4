"""A node's pools and counters as it reports them with every heartbeat."""

from __future__ import annotations

from dataclasses import asdict

from headrace.cache.pools import PoolCounts
from headrace.cache.stats import CacheCounters
from headrace.engine.build import BuiltEngine
from headrace.engine.drafts.drafting import PLACES, Drafting
from headrace.step_costs import PROMPT_SECONDS, TIMED_STEPS
from headrace.wire.cache_updates import CACHE_CHANGES
from headrace.wire.node_messages import NodeStatus, PoolStatus
from transfer.protocol.authentication import RefusalCause
from transfer.protocol.events import Cause
from transfer.protocol.stats import TransferTotals, TransportStats, WaitStats

_GROUPED = {
    "lookups": "attention/lookups",
    "looked_up_tokens": "attention/looked_up_tokens",
    "attention_hit_tokens": "attention/hit_tokens",
    "attention_fetched_tokens": "attention/fetched_tokens",
    "block_evictions": "attention/evictions",
    "state_lookups": "state/lookups",
    "state_looked_up_tokens": "state/looked_up_tokens",
    "state_hit_tokens": "state/hit_tokens",
    "state_fetched_tokens": "state/fetched_tokens",
    "checkpoints_evicted": "state/evictions",
}


def node_status(built: BuiltEngine) -> NodeStatus:
    """Returns the engine's part of the status. Call in the engine's thread only."""
    engine = built.engine
    stats, load, drafting = engine.cache.stats(), engine.load, engine.drafting
    return NodeStatus(
        running=engine.num_running,
        waiting=engine.num_waiting,
        blocks=_pool(stats.blocks, stats.num_indexed_blocks),
        slots=_pool(stats.slots, stats.num_checkpoints),
        costs=engine.cost_fit.costs,
        **asdict(load),
        counters={
            **cache_counters(stats.totals),
            "computed_tokens": engine.computed_tokens,
            TIMED_STEPS: engine.cost_fit.num_steps,
            PROMPT_SECONDS: engine.prompt_s,
            "sampled_tokens": engine.sampled_tokens,
            **draft_counters(drafting),
            CACHE_CHANGES: built.journal.sequence,
            "preemptions": engine.preemptions,
            "pauses": engine.pauses,
            "memory_shortages": engine.shortages,
            "nan_requests": engine.nan_requests,
            "recomputed_tokens": engine.recomputed_tokens,
        },
    )


def draft_counters(drafting: Drafting | None) -> dict[str, float]:
    """Returns the counters of drafts by metric name; without a drafter all are 0, and there are none by position."""
    if drafting is None:
        names = ("drafted_tokens", "accepted_tokens", "drafting_seconds", "draft_steps", "draft_steps_followed")
        return dict.fromkeys(names, 0)
    by_place = zip(PLACES, drafting.checked_at, drafting.accepted_at, strict=True)
    counters: dict[str, float] = {
        "drafted_tokens": drafting.drafted_tokens,
        "accepted_tokens": drafting.accepted_tokens,
        "drafting_seconds": drafting.seconds,
        "draft_steps": drafting.steps,
        "draft_steps_followed": drafting.steps_followed,
    }
    for place, checked, accepted in by_place:
        counters |= {f"position={place}/drafts_checked": checked, f"position={place}/drafts_accepted": accepted}
    return counters


def cache_counters(totals: CacheCounters) -> dict[str, float]:
    """Returns the cache's counters by metric name, `group/name` where each cache group has its own."""
    return {_GROUPED.get(name, name): float(value) for name, value in asdict(totals).items()}


def transfer_counters(stats: TransportStats, waits: WaitStats) -> dict[str, float]:
    """Returns the transport's counters by metric name, with labels before it: bytes, sessions, failures, waits.

    Every label is there from the start, so that a rate includes the first failure.
    """
    return {
        "transfer_sent_bytes": stats.sent_bytes - stats.probe_sent_bytes,
        "transfer_received_bytes": stats.received_bytes - stats.probe_received_bytes,
        "transfer_dropped_parts": stats.dropped_parts,
        **_sessions("sent", stats.sent),
        **_sessions("received", stats.received),
        "transfer_hidden_seconds": stats.sent.hidden_seconds,
        **{f"cause={cause}/transfer_failures": stats.failures.get(cause, 0) for cause in Cause},
        **{f"cause={cause}/transfer_refused_parts": stats.refusals.get(cause, 0) for cause in RefusalCause},
        "staging_waits": waits.count,
        "staging_wait_seconds": waits.seconds,
    }


def _sessions(direction: str, totals: TransferTotals) -> dict[str, float]:
    return {
        f"direction={direction}/transfer_sessions": totals.sessions,
        f"direction={direction},group=attention/transfer_bytes": totals.attention_bytes,
        f"direction={direction},group=attention/transfer_seconds": totals.attention_seconds,
        f"direction={direction},group=state/transfer_bytes": totals.state_bytes,
        f"direction={direction},group=state/transfer_seconds": totals.state_seconds,
    }


def _pool(counts: PoolCounts, num_indexed: int) -> PoolStatus:
    total = counts.free + counts.cached + counts.in_use
    return PoolStatus(total=total, free=counts.free, cached=counts.cached, in_use=counts.in_use, indexed=num_indexed)
