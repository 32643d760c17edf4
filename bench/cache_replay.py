"""Replays a request trace through the real cache code of one prefill node, without a model.

Each request is admitted, prefilled in chunks and released before the next one comes; the calls are those of
`engine.engine.Engine`, in its order. A trace names a block of 512 tokens of a prompt by an id that is chained
to the blocks before it, so the id serves as the block's key. Outputs are not in the traces: what a node
generated is assumed to be unknown to the prefill node (nothing is fetched from decode nodes), and to reach it
as an ordinary part of the next turn's prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cache.checkpoints import Boundary, CheckpointPolicy, ChunkSpan, PromptFacts
from cache.claims import Claim
from cache.hits import ResumeLocally
from cache.prefix_cache import PrefixCache
from cache.stats import CacheStats
from cache.types import PrefixKey, SlotId

TRACE_BLOCK_TOKENS = 512
_RESUME = ResumeLocally()


@dataclass(frozen=True, slots=True)
class Prompt:
    """`keys` are those of its full blocks."""

    num_tokens: int
    keys: Sequence[PrefixKey]


@dataclass(frozen=True)
class Trace:
    """The prompts of a trace in order, cut into blocks of `block_size` tokens."""

    name: str
    block_size: int
    prompts: Sequence[Prompt]

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @classmethod
    def read(cls, path: Path, block_size: int, limit: int | None = None) -> Trace:
        """From a Mooncake file; `block_size` must divide 512. Only the first `limit` requests, if given."""
        if block_size < 1 or TRACE_BLOCK_TOKENS % block_size:
            raise ValueError(f"block_size {block_size}: must divide {TRACE_BLOCK_TOKENS}, the blocks of the trace")
        with path.open() as lines:
            rows = [json.loads(line) for _, line in zip(range(limit or 1 << 40), lines, strict=False)]
        prompts = [Prompt(row["input_length"], _keys(row["hash_ids"], row["input_length"], block_size)) for row in rows]
        return cls(path.stem, block_size, prompts)


def _keys(hash_ids: Sequence[int], num_tokens: int, block_size: int) -> list[PrefixKey]:
    pieces = TRACE_BLOCK_TOKENS // block_size
    parts = ((hash_id, piece) for hash_id in hash_ids for piece in range(pieces))
    full = zip(range(num_tokens // block_size), parts, strict=False)
    return [PrefixKey(hash_id.to_bytes(8, "little") + piece.to_bytes(2, "little")) for _, (hash_id, piece) in full]


@dataclass(frozen=True)
class Replayed:
    """Shares of all prompt tokens: resumed from, and matched by attention blocks alone."""

    resumed_share: float
    attention_share: float
    stats: CacheStats


def replay(trace: Trace, cache: PrefixCache, policy: CheckpointPolicy, chunk_tokens: int) -> Replayed:
    """Raises ValueError if a prompt does not fit the cache at all."""
    resumed = attention = 0
    for prompt in trace.prompts:
        claim = cache.claim(
            prompt.keys,
            num_tokens=prompt.num_tokens,
            hit_policy=_RESUME,
            max_reuse_tokens=_RESUME.reuse_limit(prompt.num_tokens),
        )
        if claim is None:
            raise ValueError(f"a prompt of {prompt.num_tokens} tokens does not fit the cache: raise the budget")
        resumed += claim.reused_tokens
        attention += claim.hit.attention_tokens
        _prefill(cache, claim, prompt, policy, trace.block_size, chunk_tokens)
        cache.release(claim)
    return Replayed(resumed / trace.num_tokens, attention / trace.num_tokens, cache.stats())


def _prefill(
    cache: PrefixCache, claim: Claim, prompt: Prompt, policy: CheckpointPolicy, block_size: int, chunk_tokens: int
) -> None:
    facts = PromptFacts(prompt.num_tokens, block_size, junction=claim.junction)
    for span in _chunks(claim.reused_tokens, prompt.num_tokens, chunk_tokens, block_size):
        wanted = policy.prompt_boundaries(span, facts)
        emitted = _reserve(cache, claim, [boundary for boundary in wanted if boundary.num_tokens < span.end])
        cache.state_written(claim)
        cache.publish_blocks(claim, prompt.keys, span.end)
        for boundary, slot in emitted:
            key = prompt.keys[boundary.num_tokens // block_size - 1]
            cache.publish_checkpoint(claim, key, boundary.num_tokens, slot, boundary.tier)
        if wanted and wanted[-1].num_tokens == span.end:
            cache.donate_running(claim, prompt.keys[span.end // block_size - 1], span.end, wanted[-1].tier)


def _chunks(start: int, num_tokens: int, chunk_tokens: int, block_size: int) -> Iterator[ChunkSpan]:
    while start < num_tokens:
        end = min(start + chunk_tokens, num_tokens)
        if end < num_tokens:
            end = end // block_size * block_size
        yield ChunkSpan(start, end)
        start = end


def _reserve(cache: PrefixCache, claim: Claim, wanted: Sequence[Boundary]) -> list[tuple[Boundary, SlotId]]:
    """The firmest first; in order of position."""
    found = []
    for boundary in sorted(wanted, key=lambda boundary: -boundary.tier):
        if (slot := cache.reserve_slot(claim, boundary.tier)) is not None:
            found.append((boundary, slot))
    return sorted(found, key=lambda pair: pair[0].num_tokens)
