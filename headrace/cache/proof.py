"""Proof that cached blocks and states hold numbers: a token was drawn from them. Pure.

NaN spreads to all later tokens, by attention and by the state. Within a pass it spreads to earlier tokens, too, whose
blocks other prompts may share. So a drawn token proves all that its request has read and written until then. If no
token can be drawn, all that is not proven is forgotten, because it may be the cause. What is proven is not the cause,
and stays for other requests.
"""

from collections.abc import Iterator

from headrace.cache.claims import Claim
from headrace.cache.index import Checkpoint, Entry
from headrace.cache.storage import Storage


def prove(claim: Claim, block_size: int) -> None:
    """Notes that a token was drawn from what `claim` has read and published; O(1) for each new block."""
    claim.is_proven = True
    for entry in _entries(claim, block_size):
        if entry.is_proven:
            break  # and what it was computed from with it
        entry.is_proven = True
    for checkpoint in _checkpoints(claim):
        checkpoint.is_proven = True


def forget_unproven(storage: Storage, claim: Claim) -> bool:
    """Makes unfindable what `claim` has read or published and is not proven, and all behind its blocks.

    Returns True if some of that was there before the claim: without, the same prompt may have a next token.
    """
    unproven = [entry for entry in _entries(claim, storage.block_size) if not entry.is_proven]
    unproven_states = [checkpoint for checkpoint in _checkpoints(claim) if not checkpoint.is_proven]
    for checkpoint in unproven_states:
        if (entry := storage.index.find(checkpoint)) is not None:
            storage.forget_state(entry)
    if (first := next((entry for entry in reversed(unproven) if entry.indexed), None)) is not None:
        storage.forget(first)
    return claim.resumed in unproven_states or any(entry.num_tokens <= claim.reused_tokens for entry in unproven)


def _entries(claim: Claim, block_size: int) -> Iterator[Entry]:
    """The entries of its prefix that are of its own blocks, or of those it shares, the deepest first."""
    entry = claim.deepest_entry
    while entry is not None:
        if entry.block == claim.block_ids[entry.num_tokens // block_size - 1]:
            yield entry
        entry = entry.parent


def _checkpoints(claim: Claim) -> list[Checkpoint]:
    """The checkpoint that it began from, and those that it has published."""
    published = [checkpoint for checkpoint in claim.checkpoints if checkpoint.num_tokens > claim.reused_tokens]
    return published if claim.resumed is None else [claim.resumed, *published]
