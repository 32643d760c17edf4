"""Replays a request trace through the real cache code of one prefill node, without a model.

Each request is admitted, prefilled in chunks and released before the next one comes; the calls are those of
`headrace.engine.engine.Engine`, in its order. A trace names 512 tokens of a prompt by one id that is chained to those
before it, so blocks have 512 tokens here and the id is the block's key. Outputs are not in the traces: what a
node generated is assumed to be unknown to the prefill node (nothing is fetched from decode nodes), and to
reach it as an ordinary part of the next turn's prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from headrace.cache.checkpoints import Boundary, CheckpointPolicy, ChunkSpan, PromptFacts, by_need
from headrace.cache.claims import Claim
from headrace.cache.hits import ResumeLocally
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.stats import CacheStats
from headrace.cache.types import PrefixKey, SlotId

BLOCK_TOKENS = 512
_RESUME = ResumeLocally()


@dataclass(frozen=True, slots=True)
class Prompt:
    """`keys` are those of its full blocks."""

    num_tokens: int
    keys: Sequence[PrefixKey]


@dataclass(frozen=True)
class Trace:
    """The prompts of a trace in order."""

    name: str
    prompts: Sequence[Prompt]

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @classmethod
    def read(cls, path: Path, limit: int | None = None) -> Trace:
        """From a Mooncake file; only the first `limit` requests, if given."""
        with path.open() as lines:
            rows = [json.loads(line) for line in islice(lines, limit)]
        return cls(path.stem, [_prompt(row["input_length"], row["hash_ids"]) for row in rows])


def _prompt(num_tokens: int, hash_ids: Sequence[int]) -> Prompt:
    full = hash_ids[: num_tokens // BLOCK_TOKENS]
    return Prompt(num_tokens, [PrefixKey(hash_id.to_bytes(8, "little")) for hash_id in full])


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
        _prefill(cache, claim, prompt, policy, chunk_tokens)
        cache.release(claim)
    return Replayed(resumed / trace.num_tokens, attention / trace.num_tokens, cache.stats())


def _prefill(cache: PrefixCache, claim: Claim, prompt: Prompt, policy: CheckpointPolicy, chunk_tokens: int) -> None:
    facts = PromptFacts(prompt.num_tokens, BLOCK_TOKENS, branch_point=claim.branch_point)
    for span in _chunks(claim.reused_tokens, prompt.num_tokens, chunk_tokens):
        wanted = policy.prompt_boundaries(span, facts)
        emitted = _reserve(cache, claim, [boundary for boundary in wanted if boundary.num_tokens < span.end])
        cache.state_written(claim)
        cache.publish_blocks(claim, prompt.keys, span.end)
        for boundary, slot in emitted:
            key = prompt.keys[boundary.num_tokens // BLOCK_TOKENS - 1]
            cache.publish_checkpoint(claim, key, boundary.num_tokens, slot, boundary.tier)
        if wanted and wanted[-1].num_tokens == span.end:
            cache.donate_running(claim, prompt.keys[span.end // BLOCK_TOKENS - 1], span.end, wanted[-1].tier)


def _chunks(start: int, num_tokens: int, chunk_tokens: int) -> Iterator[ChunkSpan]:
    while start < num_tokens:
        end = min(start + chunk_tokens, num_tokens)
        if end < num_tokens:
            end = end // BLOCK_TOKENS * BLOCK_TOKENS
        yield ChunkSpan(start, end)
        start = end


def _reserve(cache: PrefixCache, claim: Claim, wanted: Sequence[Boundary]) -> list[tuple[Boundary, SlotId]]:
    """Those that got a slot, in order of position."""
    found = []
    for boundary in by_need(wanted):
        if (slot := cache.reserve_slot(claim, boundary.tier)) is not None:
            found.append((boundary, slot))
    return sorted(found, key=lambda pair: pair[0].num_tokens)
