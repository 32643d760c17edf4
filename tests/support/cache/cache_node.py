"""A scheduler and a runner without tensors, which drive the prefix cache through the engine's `Publisher`.

The "bytes" of a block are the tokens from the prompt's start through that block, those of a state the tokens that went
into it. So everything a request reuses can be compared with its own tokens, and a cache that serves another prompt's
blocks, or a state that was overwritten, is caught at the read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.cache.checkpoint_slots import PackedPool
from headrace.cache.checkpoints import (
    CHECKPOINT_GRID_TOKENS,
    ChunkSpan,
    checkpoint_policy,
)
from headrace.cache.claims import Claim
from headrace.cache.events import CacheEvent
from headrace.cache.eviction import DEFAULT_EVICTION_POLICY, eviction_policy
from headrace.cache.hashing import PrefixHasher
from headrace.cache.hits import HitPolicy, PrefixHit, ResumeLocally
from headrace.cache.index import Checkpoint
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import Publisher, ScheduledChunk
from headrace.cache.types import BlockId, PrefixKey, SlotId

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Request:
    """One running request, as a scheduler keeps it; `chunk` is the one that is computed but not yet published."""

    tokens: list[int]
    hasher: PrefixHasher
    claim: Claim
    boundaries: tuple[int, ...]
    prompt_length: int
    num_computed: int
    chunk: ScheduledChunk["Request"] | None = None
    prompt_checkpoint_positions: list[int] = field(default_factory=list)
    answer_checkpoints: list[Checkpoint] = field(default_factory=list)

    @property
    def held(self) -> Claim:
        return self.claim

    @property
    def keys(self) -> list[PrefixKey]:
        return self.hasher.keys

    @property
    def prefill_length(self) -> int:
        return self.prompt_length

    @property
    def emitting(self) -> list[SlotId]:
        """Slots that the chunk's kernels have written, not yet published."""
        return [] if self.chunk is None else [slot for _, slot in self.chunk.emit]


NUM_EMISSION_SLOTS = 2
"""Of a node with packed checkpoints."""


class FakeNode:
    """A node with one cache, which is checked after every call.

    num_packed_slots   of packed checkpoints; 0: states become checkpoints where they are
    """

    def __init__(
        self,
        *,
        policy: str = "branch",
        num_blocks: int = 64,
        num_slots: int = 16,
        num_packed_slots: int = 0,
        block_size: int = 16,
        eviction: str = DEFAULT_EVICTION_POLICY,
        checkpoint_grid_tokens: int = CHECKPOINT_GRID_TOKENS,
        on_events: Callable[[Sequence[CacheEvent]], None] = lambda events: None,
    ) -> None:
        self.cache = PrefixCache(
            num_blocks=num_blocks,
            num_slots=num_slots,
            packed=PackedPool(num_packed_slots, NUM_EMISSION_SLOTS, self._copy, self._copy)
            if num_packed_slots
            else None,
            block_size=block_size,
            eviction=eviction_policy(eviction),
            on_events=on_events,
        )
        self.policy = checkpoint_policy(policy, checkpoint_grid_tokens)
        self.block_bytes: dict[BlockId, Tokens] = {}
        self.slot_bytes: dict[SlotId, Tokens] = {}

    def match(self, tokens: Sequence[int], *, salt: bytes = b"", max_tokens: int | None = None) -> PrefixHit:
        hasher = PrefixHasher(self.cache.block_size, salt)
        hasher.extend(tokens)
        return self.cache.match(hasher.keys, max_tokens=len(tokens) if max_tokens is None else max_tokens)

    def admit(
        self,
        tokens: Sequence[int],
        *,
        hit_policy: HitPolicy | None = None,
        hints: tuple[int, ...] = (),
        salt: bytes = b"",
    ) -> Request | None:
        """Claims blocks and a slot for a prompt; what is reused must hold the prompt's own bytes."""
        hit_policy = hit_policy or ResumeLocally()
        size = self.cache.block_size
        hasher = PrefixHasher(size, salt)
        hasher.extend(tokens)
        claim = self.cache.claim(
            hasher.keys,
            num_tokens=len(tokens),
            hit_policy=hit_policy,
            max_reuse_tokens=hit_policy.reuse_limit(len(tokens)),
        )
        self.cache.check()
        if claim is None:
            return None
        for position in range(claim.reused_tokens // size):
            assert self.block_bytes[claim.block_ids[position]] == tuple(tokens[: (position + 1) * size])
        return Request(list(tokens), hasher, claim, hints, len(tokens), claim.reused_tokens)

    def start_chunk(self, request: Request, end: int) -> None:
        """Schedules and runs one chunk: reads the state, writes blocks, states and the slot; publishes nothing."""
        request.chunk = ScheduledChunk(request, ChunkSpan(request.num_computed, end))
        self._publisher.prepare([request.chunk])
        for boundary, slot in request.chunk.emit:
            self.slot_bytes[slot] = tuple(request.tokens[: boundary.num_tokens])
        self._run(request, end)

    def finish_chunk(self, request: Request) -> None:
        """Ends the chunk's step: publishes its blocks and checkpoints."""
        assert request.chunk is not None
        self._publisher.written(request.chunk)
        request.chunk = None
        self.cache.check()

    def prefill(self, request: Request, *, chunk: int | None = None) -> None:
        """Computes the rest of the prompt, in one chunk or in chunks of `chunk` tokens."""
        num_tokens = request.prompt_length
        while request.num_computed < num_tokens:
            step = num_tokens - request.num_computed if chunk is None else chunk
            self.start_chunk(request, min(request.num_computed + step, num_tokens))
            self.finish_chunk(request)

    def receive(self, request: Request) -> None:
        """Receives a transfer: the blocks beyond the hit, and the state."""
        size, num_tokens = self.cache.block_size, request.prompt_length
        for position in range(request.claim.reused_tokens // size, num_tokens // size):
            block = request.claim.block_ids[position]
            self.block_bytes[block] = tuple(request.tokens[: (position + 1) * size])
        self.slot_bytes[request.claim.slot] = tuple(request.tokens)
        request.num_computed = num_tokens
        self._publisher.publish_blocks(request)
        self._publisher.keep_decoded(request)
        self.cache.check()

    def decode(self, request: Request, answer: Sequence[int]) -> None:
        """Decodes `answer`, its first token sampled by the prefill; the last one is never computed."""
        for token in answer:
            assert self.decode_token(request, token)

    def decode_token(self, request: Request, token: int) -> bool:
        """Computes the token that is not computed yet and appends `token`. False if there is no block for it."""
        if len(request.tokens) > request.num_computed:
            self._decode_step(request)
        request.tokens.append(token)
        request.hasher.extend([token])
        extended = self.cache.extend(request.claim, len(request.tokens))
        self.cache.check()
        return extended

    def serve(
        self,
        tokens: Sequence[int],
        *,
        answer: Sequence[int] = (),
        hints: tuple[int, ...] = (),
        salt: bytes = b"",
    ) -> Request:
        """A whole request from admission to release."""
        request = self.admit(tokens, hints=hints, salt=salt)
        assert request is not None
        self.prefill(request)
        self.decode(request, answer)
        self.finish(request)
        return request

    def finish(self, request: Request) -> None:
        """Ends or aborts a request at any point."""
        for slot in request.emitting:
            self.cache.release_slot(request.claim, slot)
        self.cache.release(request.claim)
        self.cache.check()

    def evict_states(self, num: int) -> None:
        """Claims `num` slots more than are free, and releases them: as many checkpoints are evicted."""
        wanted = self.cache.stats().slots.free + num
        for claim in [self._claim_a_slot() for _ in range(wanted)]:
            self.cache.release(claim)
        self.cache.check()

    def _copy(self, source: SlotId, target: SlotId) -> None:
        self.slot_bytes[target] = self.slot_bytes[source]

    def _claim_a_slot(self) -> Claim:
        claim = self.cache.claim([], num_tokens=0, hit_policy=ResumeLocally(), max_reuse_tokens=0)
        assert claim is not None
        return claim

    @property
    def _publisher(self) -> Publisher:
        return Publisher(self.cache, self.policy)

    def _decode_step(self, request: Request) -> None:
        self.start_chunk(request, request.num_computed + 1)
        self.finish_chunk(request)

    def _run(self, request: Request, end: int) -> None:
        claim, size = request.claim, self.cache.block_size
        if request.num_computed:
            read = claim.slot if claim.source_slot is None else claim.source_slot
            assert self.slot_bytes[read] == tuple(request.tokens[: request.num_computed])
        for position in range(request.num_computed // size, end // size):
            self.block_bytes[claim.block_ids[position]] = tuple(request.tokens[: (position + 1) * size])
        self.slot_bytes[claim.slot] = tuple(request.tokens[:end])
        request.num_computed = end
