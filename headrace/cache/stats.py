"""Counters of the cache's work and contents, separate for the two groups."""

from dataclasses import dataclass

from headrace.cache.pools import PoolCounts


@dataclass(slots=True)
class CacheCounters:
    """Totals since the start. Lookups are granted claims: a claim that the cache could not grant counts nothing.

    The state group is looked up only by claims that compute their prompt here, from a checkpoint of this node or from
    one that was fetched. A state that a prefill node sends is neither a hit nor a miss. A prompt with a fetch counts
    when that has landed; what it brought is a hit, too.

    lookups                      claims granted; each looks the attention group up
    looked_up_tokens             tokens that those claims might have reused
    attention_hit_tokens         of these, matched by attention blocks, of this node or fetched
    attention_fetched_tokens     of these, beyond this node's own match
    state_lookups                claims that looked the state group up, too
    state_looked_up_tokens       tokens that those claims might have reused
    state_hit_tokens             of these, up to the deepest checkpoint, of this node or fetched
    state_fetched_tokens         of these, beyond this node's own checkpoint
    resumable_tokens             of these, where both groups match
    tombstone_tokens             of these, matched by attention blocks beyond the deepest checkpoint: not cached
    branch_points                of those claims, the ones that left a known prefix where it has no checkpoint
    reused_tokens                of all claims, tokens whose blocks were here and not written again
    block_evictions              blocks that the index had to forget
    checkpoints_published        emitted or donated states that became findable
    checkpoints_used             of these, those resumed from at least once, here or on a node they were sent to
    checkpoints_evicted          of these, those evicted for their slot, or with the blocks below them
    checkpoints_evicted_unused   of the evicted, those that were never resumed from
    """

    lookups: int = 0
    looked_up_tokens: int = 0
    attention_hit_tokens: int = 0
    attention_fetched_tokens: int = 0
    state_lookups: int = 0
    state_looked_up_tokens: int = 0
    state_hit_tokens: int = 0
    state_fetched_tokens: int = 0
    resumable_tokens: int = 0
    tombstone_tokens: int = 0
    branch_points: int = 0
    reused_tokens: int = 0
    block_evictions: int = 0
    checkpoints_published: int = 0
    checkpoints_used: int = 0
    checkpoints_evicted: int = 0
    checkpoints_evicted_unused: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot: blocks and slots by place, how many of each are findable, and the totals.

    slots    of running states, and of checkpoints unless these are packed
    packed   slots of packed checkpoints; None: there are none
    """

    blocks: PoolCounts
    slots: PoolCounts
    packed: PoolCounts | None
    num_indexed_blocks: int
    num_checkpoints: int
    totals: CacheCounters
