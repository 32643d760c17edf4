"""Accepted drafts of a step, without a model: what they leave in a cache is what steps of one token each leave."""

import pytest

from headrace.cache.checkpoints import ChunkSpan, checkpoint_policy
from headrace.cache.hashing import PrefixHasher
from headrace.cache.hits import ResumeLocally
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.publishing import Publisher, ScheduledChunk
from headrace.cache.tails import Tail
from headrace.engine.drafts.accepted import keep_accepted, num_accepted
from headrace.engine.sequence import Job, Sequence
from tests.support.engine.driving import GREEDY, request, resume_locally

BLOCK = 4


@pytest.mark.parametrize(
    ("drawn", "drafts", "expected"),
    [([5, 6, 7], (5, 6), 2), ([5, 6, 7], (5, 7), 1), ([5, 6, 7], (6, 6), 0), ([5], (), 0)],
)
def test_drafts_count_up_to_the_first_wrong_one(drawn, drafts, expected) -> None:
    assert num_accepted(drawn, drafts) == expected


class Decoding:
    """A sequence whose first `length` tokens are computed, in a cache of its own that keeps every boundary."""

    def __init__(self, length: int) -> None:
        self.cache = PrefixCache(num_blocks=16, num_slots=8, block_size=BLOCK, num_draft_slots=12)
        self.publisher = Publisher(self.cache, checkpoint_policy("every", 0))
        job = Job(request([7] * 3, GREEDY), resume_locally, 100, 0.0, print)
        self.sequence = Sequence(job, PrefixHasher(BLOCK))
        self.sequence.hasher.extend([7] * 3)
        claim = self.cache.claim([], num_tokens=40, hit_policy=ResumeLocally(), max_reuse_tokens=0)
        self.sequence.claim, self.sequence.num_computed = claim, 3
        self.tokens_of: dict[int, int] = {}  # by slot: after how many tokens is the state that was written there
        self.step([9] * (length - 3), at_once=False)

    def step(self, tokens: list[int], *, at_once: bool, num_wrong: int = 0) -> None:
        """Computes a token before each of these; `num_wrong` drafts more were checked, and are wrong."""
        for part in [tokens] if at_once else [[token] for token in tokens]:
            start = self.sequence.num_computed
            chunk = ScheduledChunk(self.sequence, ChunkSpan(start, start + len(part) + num_wrong))
            chunk.draft_slots = self.cache.draft_slots.take(len(part) - 1 + num_wrong)
            written = enumerate((*chunk.draft_slots, self.sequence.held.slot), start + 1)
            self.tokens_of.update((slot, num_tokens) for num_tokens, slot in written)
            self.sequence.extend(part)
            keep_accepted(chunk, len(part), self.cache, self.publisher)
            self.cache.draft_slots.give_back(chunk.draft_slots)
            self.cache.check()
            assert self.tokens_of[self.sequence.state_slot] == self.sequence.num_computed == start + len(part)

    @property
    def found(self) -> tuple[object, ...]:
        """What of it is in the cache."""
        stats, contents = self.cache.stats(), self.cache.contents()
        positions = [checkpoint.num_tokens for checkpoint in self.sequence.answer_checkpoints]
        return positions, set(contents.blocks), set(contents.checkpoints), stats.slots, stats.blocks


@pytest.mark.parametrize("length", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("num_wrong", [0, 1, 3])
def test_tokens_accepted_at_once_leave_what_single_steps_leave(length: int, num_tokens: int, num_wrong: int) -> None:
    at_once, one_by_one = Decoding(length), Decoding(length)
    tokens = list(range(20, 20 + num_tokens))
    at_once.step(tokens, at_once=True, num_wrong=num_wrong)
    one_by_one.step(tokens, at_once=False)
    assert at_once.found == one_by_one.found
    kept = {checkpoint.num_tokens: checkpoint.slot for checkpoint in at_once.sequence.answer_checkpoints}
    assert list(kept) == list(range(BLOCK, length + num_tokens + 1, BLOCK))
    assert all(at_once.tokens_of[slot] == position for position, slot in kept.items())


class DecodingWithTail(Decoding):
    """The same, of a model that keeps tails."""

    def step(self, tokens: list[int], *, at_once: bool, num_wrong: int = 0) -> None:
        sequence, claim = self.sequence, self.sequence.held
        for part in [tokens] if at_once else [[token] for token in tokens]:
            start = sequence.num_computed
            sequence.tail = sequence.tail or Tail(0, start)
            chunk = ScheduledChunk(sequence, ChunkSpan(start, start + len(part) + num_wrong))
            chunk.tail = sequence.tail.step(chunk.span, BLOCK)
            if chunk.tail.written is not None:
                rests_on_draft = chunk.tail.written > start + 1
                chunk.draft_slots = self.cache.draft_slots.take(int(rests_on_draft and claim.source is None))
                self.tokens_of[(*chunk.draft_slots, claim.slot)[0]] = chunk.tail.written
            elif claim.source is None:
                self.tokens_of.setdefault(claim.slot, start)
            sequence.extend(part)
            keep_accepted(chunk, len(part), self.cache, self.publisher)
            self.cache.draft_slots.give_back(chunk.draft_slots)
            self.cache.check()
            assert sequence.num_computed == start + len(part)
            assert self.tokens_of[sequence.state_slot] == sequence.tail.base > sequence.num_computed - BLOCK


@pytest.mark.parametrize("length", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("num_tokens", "num_wrong"), [(1, 0), (1, 1), (1, 3), (2, 0), (2, 2), (3, 1), (4, 0)])
def test_with_a_tail_tokens_leave_the_same(length: int, num_tokens: int, num_wrong: int) -> None:
    """The state at an end of a block is written in passing, on a draft or not, and may be forgotten with it."""
    with_tail, without = DecodingWithTail(length), Decoding(length)
    for first in (20, 40, 60):
        tokens = list(range(first, first + num_tokens))
        with_tail.step(tokens, at_once=True, num_wrong=num_wrong)
        without.step(tokens, at_once=False)
        # Slots aside: a checkpoint stays in use as the base of the tail.
        assert with_tail.found[:3] == without.found[:3] and with_tail.found[4] == without.found[4]
    kept = {checkpoint.num_tokens: checkpoint.slot for checkpoint in with_tail.sequence.answer_checkpoints}
    assert all(with_tail.tokens_of[slot] == position for position, slot in kept.items())
