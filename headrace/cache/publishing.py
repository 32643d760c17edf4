"""Publishing: a request's full blocks become findable, and its states where the checkpoint policy keeps them.

Around each step, `Publisher.prepare` reserves slots for the states that the step's kernels emit, and
`Publisher.written` publishes the step's blocks and checkpoints. The engine, the trace replay of benchmarks/ and the
tests' node without tensors all follow this one protocol. A full cache is no error here: less is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from headrace.cache.checkpoints import Boundary, CheckpointPolicy, ChunkSpan, PromptFacts, by_need
from headrace.cache.claims import Claim
from headrace.cache.index import Checkpoint
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.tails import Tail
from headrace.cache.types import PrefixKey, SlotId


class CachedSequence(Protocol):
    """A running request as the publisher sees it.

    held             its claim
    keys             prefix keys of its full blocks; grows with its tokens
    boundaries       the router's hints, in tokens (`PromptFacts.hints`)
    prompt_length    tokens it came with
    prefill_length   leading tokens computed in chunks: the prompt, and after a preemption also the answer so far
    num_computed     leading tokens whose blocks and state are written
    prompt_checkpoint_positions   of the checkpoints published in its prompt; the publisher appends to it
    answer_checkpoints            those in its answer that are still kept; the publisher appends and removes
    """

    @property
    def held(self) -> Claim: ...

    @property
    def keys(self) -> Sequence[PrefixKey]: ...

    @property
    def boundaries(self) -> tuple[int, ...]: ...

    @property
    def prompt_length(self) -> int: ...

    @property
    def prefill_length(self) -> int: ...

    @property
    def num_computed(self) -> int: ...

    @property
    def prompt_checkpoint_positions(self) -> list[int]: ...

    @property
    def answer_checkpoints(self) -> list[Checkpoint]: ...


S = TypeVar("S", bound=CachedSequence)


@dataclass(eq=False, slots=True)
class ScheduledChunk(Generic[S]):
    """One sequence's part of a step: the tokens `span.start` .. `span.end - 1`, and the checkpoints it leaves.

    emit          boundaries inside the span, ascending, with the slots that the kernels write their states to
    at_end        the boundary at the end of the span, if kept: the running state itself is donated after the step
    drafts        of its tokens, all behind the first; `num_drafts` of them
    slack         most tokens by which the span may begin later: the drafts of a check in flight, if all are accepted
    draft_slots   slots for states that rest on drafts. Without a tail, they are for the states after all tokens but the
                  last. With a tail, there is one for the state that the step writes, unless the claim's slot gets it
    tail          of a decode: what the step does with its sequence's tail. None: without a tail, the state is written
    """

    sequence: S
    span: ChunkSpan
    emit: list[tuple[Boundary, SlotId]] = field(default_factory=list)
    at_end: Boundary | None = None
    drafts: Sequence[int] = ()
    num_drafts: int = 0
    slack: int = 0
    draft_slots: list[SlotId] = field(default_factory=list)
    tail: Tail | None = None

    def begin_at(self, num_tokens: int) -> None:
        """Places the span behind so many tokens, now that they are known."""
        self.span = ChunkSpan(num_tokens, num_tokens + self.span.end - self.span.start)
        self.slack = 0

    @property
    def writes_in_place(self) -> bool:
        """True if the step writes a state where it reads the one before, for which there is no way back."""
        if self.sequence.held.source is not None:
            return False
        return self.tail is None or (self.tail.written is not None and not self.draft_slots)


class Publisher:
    """Applies a checkpoint policy before each step, and publishes after it."""

    def __init__(self, cache: PrefixCache, policy: CheckpointPolicy) -> None:
        self._cache = cache
        self._policy = policy

    def prepare(self, chunks: Sequence[ScheduledChunk[S]]) -> None:
        """Sets the checkpoints that the chunks are to leave, and reserves slots for those that kernels emit.

        Higher tiers get their slots first, over all chunks. A checkpoint without a slot is skipped.
        """
        wanted: list[tuple[Boundary, ScheduledChunk[S]]] = []
        for chunk in chunks:
            if chunk.span.start >= chunk.sequence.prefill_length:
                continue  # an answer's token
            boundaries = self._policy.prompt_boundaries(chunk.span, self._facts(chunk.sequence))
            if not boundaries:
                continue
            chunk.at_end = next((boundary for boundary in boundaries if boundary.num_tokens == chunk.span.end), None)
            inside = [boundary for boundary in boundaries if boundary is not chunk.at_end]
            wanted += [(boundary, chunk) for boundary in by_need(inside)]
        for boundary, chunk in sorted(wanted, key=lambda pair: -pair[0].tier):
            slot = self._cache.reserve_slot(chunk.sequence.held, boundary.tier)
            if slot is not None:
                chunk.emit.append((boundary, slot))
        for _, chunk in wanted:
            chunk.emit.sort(key=lambda pair: pair[0].num_tokens)

    def written(self, chunk: ScheduledChunk[S]) -> None:
        """The step has written the chunk's blocks and states; the sequence's `num_computed` is at its end.

        With a tail it may be at the state that the step has written, and then once more at the end.
        """
        sequence, claim = chunk.sequence, chunk.sequence.held
        num_computed, size = sequence.num_computed, self._cache.block_size
        if chunk.tail is None or chunk.tail.written == num_computed:
            self._cache.state_written(claim)
        deepest = claim.deepest_entry
        is_found = deepest is None or deepest.indexed  # else its blocks were forgotten with one above them
        if is_found and num_computed % size and num_computed // size == chunk.span.start // size:
            return  # no block is full that was not, as behind most tokens of an answer
        self.publish_blocks(sequence)
        for boundary, slot in chunk.emit:
            key = self._key(sequence, boundary.num_tokens)
            _record(sequence, self._cache.publish_checkpoint(claim, key, boundary.num_tokens, slot, boundary.tier))
        if chunk.at_end is not None:
            num_tokens = chunk.at_end.num_tokens
            key = self._key(sequence, num_tokens)
            _record(sequence, self._cache.donate_running(claim, key, num_tokens, chunk.at_end.tier))
        if sequence.num_computed > sequence.prompt_length:
            self.keep_decoded(sequence)

    def given_up(self, chunk: ScheduledChunk[S]) -> None:
        """The chunk's sequence ends without what the step has written: frees the slots that `prepare` reserved."""
        for _, slot in chunk.emit:
            self._cache.release_slot(chunk.sequence.held, slot)

    def would_keep(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """True if the rest of its prefill leaves a checkpoint at `num_tokens`, once that is among its `boundaries`, and
        if a slot is left for it."""
        rest = ChunkSpan(sequence.num_computed, sequence.prefill_length)
        facts = replace(self._facts(sequence), hints=(num_tokens,))
        return any(each.num_tokens == num_tokens for each in self._policy.prompt_boundaries(rest, facts))

    def publish_blocks(self, sequence: CachedSequence) -> None:
        """Publishes all blocks of the sequence that are full."""
        self._cache.publish_blocks(sequence.held, sequence.keys, sequence.num_computed)

    def keep_received(self, sequence: CachedSequence) -> None:
        """Makes the state of a part of the prompt, just received, a checkpoint if the policy keeps any."""
        if self._stands_at_kept_boundary(sequence):
            claim, num_tokens = sequence.held, sequence.num_computed
            _record(sequence, self._cache.donate_running(claim, self._key(sequence, num_tokens), num_tokens))

    def keep_decoded(self, sequence: CachedSequence) -> None:
        """Makes the running state a checkpoint at the boundaries of the answer that the policy keeps.

        A newer checkpoint may supersede the request's older ones.
        """
        claim, num_tokens, kept = sequence.held, sequence.num_computed, sequence.answer_checkpoints
        if not self._stands_at_kept_boundary(sequence) or _is_kept(sequence):
            return
        for old in list(self._policy.superseded(kept)):  # first, so that the newer one gets their slot
            self._cache.unpublish(old)
            kept.remove(old)
        checkpoint = self._cache.donate_running(claim, self._key(sequence, num_tokens), num_tokens)
        if checkpoint is not None:
            kept.append(checkpoint)

    def _facts(self, sequence: CachedSequence) -> PromptFacts:
        return PromptFacts(
            sequence.prefill_length, self._cache.block_size, sequence.boundaries, sequence.held.branch_point
        )

    def _stands_at_kept_boundary(self, sequence: CachedSequence) -> bool:
        num_tokens, size = sequence.num_computed, self._cache.block_size
        return num_tokens > 0 and num_tokens % size == 0 and self._policy.decoded_boundary(num_tokens, size)

    def _key(self, sequence: CachedSequence, num_tokens: int) -> PrefixKey:
        return sequence.keys[num_tokens // self._cache.block_size - 1]


def _is_kept(sequence: CachedSequence) -> bool:
    """True if its state is a checkpoint already."""
    kept = sequence.answer_checkpoints
    newest = kept[-1].num_tokens if kept else None
    return sequence.held.source is not None or newest == sequence.num_computed


def _record(sequence: CachedSequence, checkpoint: Checkpoint | None) -> None:
    """Adds a prefill's checkpoint, if it left one, to those of its prompt or of the answer that it recomputes."""
    if checkpoint is None:
        return
    if checkpoint.num_tokens <= sequence.prompt_length:
        sequence.prompt_checkpoint_positions.append(checkpoint.num_tokens)
    else:
        sequence.answer_checkpoints.append(checkpoint)
