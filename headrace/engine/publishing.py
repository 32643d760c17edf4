"""What a step leaves findable in the cache: blocks as they fill, and states where the policy wants them kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.cache.checkpoints import Boundary, CheckpointPolicy, PromptFacts, by_need
from headrace.cache.index import Checkpoint
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.types import PrefixKey, SlotId
from headrace.engine.scheduler import Planned
from headrace.engine.sequence import Sequence


@dataclass(frozen=True)
class Share:
    """One sequence's share of a step, with the checkpoints that it is to leave.

    inside   those that the policy wants before the end of the chunk
    at_end   the one where the chunk ends: the running state itself, donated afterwards
    emit     of `inside`, those that got a slot, in order
    """

    planned: Planned
    inside: list[Boundary]
    at_end: Boundary | None
    emit: list[tuple[Boundary, SlotId]] = field(default_factory=list)


class Publisher:
    """Asks the policy before a step, publishes after it. Nothing here is an error for want of room."""

    def __init__(self, cache: PrefixCache, policy: CheckpointPolicy) -> None:
        self._cache = cache
        self._policy = policy

    def prepare(self, planned: Iterable[Planned]) -> list[Share]:
        """The step's shares, with slots for what their kernels emit: the firmest first, over all of them.

        Without a slot a prompt goes on without that checkpoint.
        """
        shares = [self._share(each) for each in planned]
        wanted = [(boundary, share) for share in shares for boundary in by_need(share.inside)]
        for boundary, share in sorted(wanted, key=lambda pair: -pair[0].tier):
            slot = self._cache.reserve_slot(share.planned.sequence.held, boundary.tier)
            if slot is not None:
                share.emit.append((boundary, slot))
        for share in shares:
            share.emit.sort(key=lambda pair: pair[0].num_tokens)
        return shares

    def written(self, share: Share) -> None:
        """The step has written the share's blocks and states; `num_computed` stands at its end."""
        sequence = share.planned.sequence
        claim = sequence.held
        self._cache.state_written(claim)
        self.publish_blocks(sequence)
        for boundary, slot in share.emit:
            key = self._key(sequence, boundary.num_tokens)
            _note(sequence, self._cache.publish_checkpoint(claim, key, boundary.num_tokens, slot, boundary.tier))
        if share.at_end is not None:
            num_tokens = share.at_end.num_tokens
            if self._cache.donate_running(claim, self._key(sequence, num_tokens), num_tokens, share.at_end.tier):
                _note(sequence, claim.source)
        if sequence.num_computed > sequence.prompt_length:
            self.keep_decoded(sequence)

    def publish_blocks(self, sequence: Sequence) -> None:
        """All that are full."""
        self._cache.publish_blocks(sequence.held, sequence.hasher.keys, sequence.num_computed)

    def keep_received(self, sequence: Sequence) -> None:
        """The state that has just landed, of a part of the prompt, becomes a checkpoint if the policy keeps any."""
        if self._stands_where_kept(sequence):
            claim, num_tokens = sequence.held, sequence.num_computed
            if self._cache.donate_running(claim, self._key(sequence, num_tokens), num_tokens):
                _note(sequence, claim.source)

    def keep_decoded(self, sequence: Sequence) -> None:
        """Past the prompt, the policy keeps boundaries; a newer one may supersede the request's older ones."""
        claim, num_tokens = sequence.held, sequence.num_computed
        if claim.source is not None or not self._stands_where_kept(sequence):
            return  # its state is a checkpoint already, or should not be one
        # First, so that the newer one finds room.
        for old in list(self._policy.superseded(sequence.decoded)):
            self._cache.unpublish(old)
            sequence.decoded.remove(old)
        if self._cache.donate_running(claim, self._key(sequence, num_tokens), num_tokens):
            assert claim.source is not None, "a donated state is what the claim reads next"
            sequence.decoded.append(claim.source)

    def _share(self, planned: Planned) -> Share:
        sequence, span = planned.sequence, planned.span
        if not sequence.is_prefilling:
            return Share(planned, [], None)
        facts = PromptFacts(
            sequence.prefill_length, self._cache.block_size, sequence.request.boundaries, sequence.held.branch_point
        )
        boundaries = self._policy.prompt_boundaries(span, facts)
        at_end = next((boundary for boundary in boundaries if boundary.num_tokens == span.end), None)
        return Share(planned, [boundary for boundary in boundaries if boundary is not at_end], at_end)

    def _stands_where_kept(self, sequence: Sequence) -> bool:
        num_tokens, size = sequence.num_computed, self._cache.block_size
        return num_tokens > 0 and num_tokens % size == 0 and self._policy.decoded_boundary(num_tokens, size)

    def _key(self, sequence: Sequence, num_tokens: int) -> PrefixKey:
        return sequence.hasher.keys[num_tokens // self._cache.block_size - 1]


def _note(sequence: Sequence, checkpoint: Checkpoint | None) -> None:
    """A prefill left a checkpoint (None: it did not): in the prompt, or in what it computes again."""
    if checkpoint is None:
        return
    if checkpoint.num_tokens <= sequence.prompt_length:
        sequence.checkpoints.append(checkpoint.num_tokens)
    else:
        sequence.decoded.append(checkpoint)
