"""A step's new tokens, accepted drafts among them: which count, and what their states leave in the cache. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import Publisher, ScheduledChunk
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.sequence import Sequence
from headrace.request import FinishReason


def num_accepted(drawn: SequenceOf[int], drafts: SequenceOf[int]) -> int:
    """Leading drafts that are the token drawn in their place."""
    number = 0
    for draft in drafts:
        if drawn[number] != draft:
            break
        number += 1
    return number


def append_new(sequence: Sequence, token_ids: list[int], rules: StopRules) -> tuple[int, FinishReason | None]:
    """Appends new tokens up to the one that ends the sequence; returns how many, and why it ends."""
    if sequence.grammar is None:
        num_taken, finish = rules.taken(sequence, token_ids)
        sequence.extend(token_ids[:num_taken])
        return num_taken, finish
    for number, token_id in enumerate(token_ids, 1):
        sequence.append(token_id)
        finish = rules.finish_reason(sequence)
        if finish is not None or sequence.is_confused:
            return number, finish
    return len(token_ids), None


def keep_accepted(chunk: ScheduledChunk[Sequence], num_tokens: int, cache: PrefixCache, publisher: Publisher) -> None:
    """Counts the first `num_tokens` of a chunk with drafts as computed, at least one, and publishes what they reach.

    That is what steps of one token each would have published. Between ends of blocks they publish nothing, so that
    only the states there and the last one become the claim's in turn.
    """
    tail = chunk.tail
    if tail is None:
        _keep_without_tail(chunk, num_tokens, cache, publisher)
        return
    # A block ends where a state is written, or nowhere in the step. That state counts if all tokens before it do.
    sequence, end = chunk.sequence, chunk.sequence.num_computed + num_tokens
    if tail.written is not None and tail.written <= end:
        if chunk.draft_slots:
            cache.draft_slots.accept(sequence.held, chunk.draft_slots, chunk.draft_slots[0])
        sequence.num_computed = tail.written
        publisher.written(chunk)
        sequence.tail = tail.after(end)
    sequence.num_computed = end


def _keep_without_tail(
    chunk: ScheduledChunk[Sequence], num_tokens: int, cache: PrefixCache, publisher: Publisher
) -> None:
    """As `keep_accepted`, of states that were written after each token."""
    sequence, claim = chunk.sequence, chunk.sequence.held
    start, size = sequence.num_computed, cache.block_size
    states, end = (*chunk.draft_slots, claim.slot), start + num_tokens
    for num_computed in (*range(start - start % size + size, end, size), end):
        state = states[num_computed - start - 1]
        if state != claim.slot:
            cache.draft_slots.accept(claim, chunk.draft_slots, state)
        sequence.num_computed = num_computed
        publisher.written(chunk)
