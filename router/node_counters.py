"""Help texts of the nodes' counters. Nodes send counters by name; their meaning is told once, here."""

from __future__ import annotations

TEXTS = {
    "accepted_tokens": "Drafted tokens that turned out to be the answer's",
    "branch_points": "Prompts that left a known prefix where it has no checkpoint",
    "bytes_not_moved": "Bytes of cached blocks that a decode node had, so that no prefill node sent them",
    "cache_changes": "Changes of the node's cache index, each of which routers follow",
    "checkpoints_evicted_unused": "Checkpoints that were evicted before any prompt resumed from them",
    "checkpoints_published": "Checkpoints of states that prompts can resume from",
    "checkpoints_used": "Checkpoints that were resumed from at least once, here or where they were sent",
    "computed_tokens": "Tokens that the engine computed, of prompts and of answers",
    "drafted_tokens": "Tokens drafted for steps, right or wrong",
    "evictions": "Blocks and checkpoints that made room for others",
    "fetch_failures": "Fetches that failed, whose prompts were computed instead",
    "fetch_serve_failures": "Fetches by other nodes that failed on this side",
    "fetch_served_bytes": "Bytes sent to nodes that fetched",
    "fetch_served_tokens": "Tokens whose blocks were sent to nodes that fetched",
    "fetched_bytes": "Bytes fetched from other nodes",
    "fetched_tokens": "Prompt tokens fetched from other nodes",
    "fetches": "Fetches from other nodes that landed",
    "fetches_declined": "Fetches that were possible and estimated not to pay",
    "fetches_gone": "Fetches whose source had evicted what was wanted",
    "fetches_served": "Fetches by other nodes that this one served",
    "hit_tokens": "Prompt tokens found in the cache, for each cache group",
    "local_requests": "Prompts that a decode node computed itself",
    "looked_up_tokens": "Prompt tokens looked up in the cache, for each cache group",
    "lookups": "Prompts looked up in the cache, for each cache group",
    "memory_shortages": "Steps that found too little memory, and ended one request",
    "orphans_adopted": "Requests of lost routers that another router went on with",
    "orphans_kept": "Requests that were kept when their router was lost",
    "pauses": "Times that an answer paused because nobody read it",
    "preemptions": "Requests that gave up blocks and were computed again later",
    "recomputed_tokens": "Tokens computed again after a preemption",
    "remote_hit_tokens": "Prompt tokens that a decode node had, of prompts computed elsewhere",
    "remote_requests": "Prompts that a prefill node computed for a decode node",
    "resumable_tokens": "Prompt tokens that were not computed, because both cache groups had them",
    "reused_tokens": "Prompt tokens whose blocks were here and not written again",
    "sampled_tokens": "Tokens drawn",
    "staging_wait_seconds": "Seconds that messages of transfers waited for a staging buffer",
    "staging_waits": "Messages of transfers that waited for a staging buffer",
    "timed_steps": "Steps to which the node's own costs are fitted",
    "tombstone_tokens": "Prompt tokens whose blocks were cached beyond the deepest checkpoint: computed again",
    "transfer_bytes": "Bytes of blocks and states moved between nodes, by direction and cache group",
    "transfer_dropped_parts": "Received parts of transfers that belong to no session any more",
    "transfer_failures": "Transfer sessions that failed on this side, by cause",
    "transfer_hidden_seconds": "Seconds of sending during which the prompt was still being computed",
    "transfer_received_bytes": "Bytes received on the data path, of failed sessions too",
    "transfer_refused_parts": "Received parts without a valid MAC: investigate any",
    "transfer_seconds": "Seconds in which blocks and states moved, by direction and cache group",
    "transfer_sent_bytes": "Bytes sent on the data path, of failed sessions too",
    "transfer_sessions": "Transfer sessions completed, by direction",
}


def text_of(name: str) -> str:
    """The help text of a node's counter; a general one for a counter of another release."""
    return TEXTS.get(name, "A counter of the node")
