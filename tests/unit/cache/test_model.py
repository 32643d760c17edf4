"""Random requests against the cache, next to a plain model of what they hold and of what may be found.

The model knows nothing of trees, order or eviction. It knows who holds which block and slot, what bytes
were written to each, and which prefixes were published. From that follow the exact counts in use and the
exact answer to "is there capacity"; what can be found must hold the right bytes, must have been published, and
may disappear only by an eviction and only if no request reuses it.
"""

from collections.abc import Sequence
from enum import Enum
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.cache.checkpoints import CHECKPOINT_POLICIES
from headrace.cache.claims import Hold
from headrace.cache.events import BlockEvicted, BlockStored, CacheEvent, CheckpointEvicted, CheckpointStored
from headrace.cache.eviction import EVICTION_POLICIES
from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import ReceiveState, ResumeLocally
from headrace.cache.leases import LeaseId, Leases
from headrace.cache.types import BlockId, PrefixKey, SlotId
from tests.support.cache.cache_node import FakeNode, Request, Tokens

SIZE = 4
# Few different blocks, so that prompts share starts and part at every boundary.
full_blocks = st.sampled_from([(0,) * SIZE, (1,) * SIZE, (0, 0, 1, 1)])
prompts = st.builds(
    lambda full, rest: [token for block in full for token in block] + [2] * rest,
    st.lists(full_blocks, min_size=1, max_size=5),
    st.integers(0, SIZE - 1),
)
picks = st.integers(0, 10**6)


class Phase(Enum):
    WAITING = "for its state to arrive"
    PREFILLING = "between two chunks"
    IN_STEP = "a chunk is computed but not published"
    DECODING = "between two tokens"


class CacheMachine(RuleBasedStateMachine):
    num_steps = 0

    @initialize(
        num_blocks=st.integers(4, 24),
        num_slots=st.integers(1, 10),
        num_packed_slots=st.just(0) | st.integers(1, 10),
        policy=st.sampled_from(CHECKPOINT_POLICIES),
        eviction=st.sampled_from(EVICTION_POLICIES),
    )
    def start(self, num_blocks: int, num_slots: int, num_packed_slots: int, policy: str, eviction: str) -> None:
        self.num_blocks, self.num_slots, self.is_packed = num_blocks, num_slots, num_packed_slots > 0
        self.node = FakeNode(
            policy=policy,
            num_blocks=num_blocks,
            num_slots=num_slots,
            num_packed_slots=num_packed_slots,
            block_size=SIZE,
            eviction=eviction,
            checkpoint_grid_tokens=SIZE,
            on_events=self.hear,
        )
        self.heard: dict[tuple[type, PrefixKey], CacheEvent] = {}
        self.index = self.node.cache._storage.index
        self.phases: dict[Request, Phase] = {}
        self.leased: dict[LeaseId, Hold] = {}
        self.now_s = 0.0
        self.leases = Leases(lambda: self.now_s)
        self.findable: set[PrefixKey] = set()
        self.num_evictions = 0

    # What requests do

    @rule(tokens=prompts, remote=st.booleans(), hints=st.lists(st.integers(0, 24), max_size=2))
    def admit(self, tokens: list[int], remote: bool, hints: list[int]) -> None:
        policy = ReceiveState() if remote else ResumeLocally()
        hit = self.node.match(tokens, max_tokens=policy.reuse_limit(len(tokens)))
        shared, source = self.reused(tokens, policy.reusable_tokens(hit), policy.resume_tokens(hit))
        num_new = -(-len(tokens) // SIZE) - len(shared)
        block_room = self.num_blocks - len(self.held_blocks() | set(shared))
        emitting = {slot for each in self.phases for slot in each.emitting}
        slot_room = self.num_slots - len(self.held_slots() - emitting if self.is_packed else self.held_slots() | source)
        before = self.node.cache.stats()

        request = self.node.admit(tokens, hit_policy=policy, hints=tuple(hints))

        assert (request is not None) == (block_room >= num_new and slot_room >= 1)
        if request is None:
            assert self.node.cache.stats() == before
            return
        claim = request.claim
        assert (claim.hit, claim.reused_tokens) == (hit, policy.reusable_tokens(hit))
        assert claim.block_ids[: len(shared)] == shared
        assert ({claim.source_slot} - {None}) == (set() if self.is_packed else source)
        new = claim.block_ids[len(shared) :]
        assert len(set(new)) == num_new and not set(new) & (self.held_blocks() | set(shared))
        assert claim.slot not in self.held_slots() | source
        self.phases[request] = Phase.WAITING if remote else Phase.PREFILLING

    def reused(self, tokens: list[int], reused: int, resumed: int | None) -> tuple[list[BlockId], set[SlotId]]:
        """The blocks and the checkpoint slot that a prompt would share, by looking into the index."""
        entries = [self.index.get(key) for key in prefix_keys(tokens[:reused], SIZE)]
        shared = [entry.block for entry in entries if entry is not None]
        assert len(shared) == reused // SIZE
        if resumed is None:
            return shared, set()
        entry = self.index.get(prefix_keys(tokens[:resumed], SIZE)[-1])
        assert entry is not None and entry.checkpoint is not None
        return shared, {entry.checkpoint.slot}

    @precondition(lambda self: self.phases)
    @rule(pick=picks, num_tokens=st.integers(1, 16), answer=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def advance(self, pick: int, num_tokens: int, answer: list[int]) -> None:
        request = self.choose(pick)
        match self.phases[request]:
            case Phase.PREFILLING:
                end = min(request.num_computed + num_tokens, request.prompt_length)
                self.node.start_chunk(request, end)
                self.phases[request] = Phase.IN_STEP
            case Phase.IN_STEP:
                self.node.finish_chunk(request)
                self.published(request)
                done = request.num_computed == request.prompt_length
                self.phases[request] = Phase.DECODING if done else Phase.PREFILLING
            case Phase.WAITING:
                self.node.receive(request)
                self.published(request)
                self.phases[request] = Phase.DECODING
            case Phase.DECODING:
                self.decode(request, answer)

    def decode(self, request: Request, answer: list[int]) -> None:
        for token in answer:
            num_computed = request.num_computed
            extended = self.node.decode_token(request, token)
            if request.num_computed > num_computed:  # the first token needs no step, so nothing is published
                self.published(request)
            if not extended:
                assert len(self.held_blocks()) == self.num_blocks
                self.finish(request)
                return

    @precondition(lambda self: self.phases)
    @rule(pick=picks)
    def finish_or_abort(self, pick: int) -> None:
        self.finish(self.choose(pick))

    def finish(self, request: Request) -> None:
        self.node.finish(request)
        del self.phases[request]

    # Leases

    @precondition(lambda self: list(self.index.checkpoints()))
    @rule(pick=picks, ttl_s=st.integers(1, 5))
    def lease_checkpoint(self, pick: int, ttl_s: int) -> None:
        checkpoints = list(self.index.checkpoints())
        hold = self.node.cache.hold_checkpoint(checkpoints[pick % len(checkpoints)])
        assert hold is not None
        self.lease(hold, ttl_s)

    def lease(self, hold: Hold, ttl_s: int) -> None:
        lease = self.leases.grant(partial(self.node.cache.drop, hold), deadline_s=self.now_s + ttl_s)
        self.leased[lease] = hold

    @precondition(lambda self: self.leased)
    @rule(pick=picks)
    def release_lease(self, pick: int) -> None:
        lease = list(self.leased)[pick % len(self.leased)]
        assert self.leases.release(lease)
        del self.leased[lease]

    @rule(num_s=st.integers(0, 4))
    def time_passes(self, num_s: int) -> None:
        self.now_s += num_s
        for lease in self.leases.expire():
            del self.leased[lease]

    # The model

    def hear(self, events: Sequence[CacheEvent]) -> None:
        """Apply events as a subscriber does; one that cannot apply is an error."""
        for event in events:
            self.apply(event)

    def apply(self, event: CacheEvent) -> None:
        match event:
            case BlockStored(key, parent):
                assert parent is None or (BlockStored, parent) in self.heard
                assert (BlockStored, key) not in self.heard
                self.heard[BlockStored, key] = event
            case CheckpointStored(key):
                assert (BlockStored, key) in self.heard and (CheckpointStored, key) not in self.heard
                self.heard[CheckpointStored, key] = event
            case CheckpointEvicted(key):
                del self.heard[CheckpointStored, key]
            case BlockEvicted(key):
                assert (CheckpointStored, key) not in self.heard
                assert all(stored.parent != key for stored in self.heard.values() if isinstance(stored, BlockStored))
                del self.heard[BlockStored, key]

    def choose(self, pick: int) -> Request:
        return list(self.phases)[pick % len(self.phases)]

    def held_blocks(self) -> set[BlockId]:
        owners = [request.claim.block_ids for request in self.phases]
        owners += [hold.block_ids for hold in self.leased.values()]
        return {block for block_ids in owners for block in block_ids}

    def held_slots(self) -> set[SlotId]:
        held = {request.claim.slot for request in self.phases}
        held |= {request.claim.source.slot for request in self.phases if request.claim.source is not None}
        held |= {slot for request in self.phases for slot in request.emitting}
        return held if self.is_packed else held | self.leased_slots()

    def leased_slots(self) -> set[SlotId]:
        return {hold.checkpoint.slot for hold in self.leased.values()}

    def published(self, request: Request) -> None:
        self.findable.update(request.keys[: request.num_computed // SIZE])

    @staticmethod
    def key_of(contents: Tokens) -> PrefixKey:
        return prefix_keys(contents, SIZE)[-1]

    @invariant()
    def pools_and_index_are_sound(self) -> None:
        CacheMachine.num_steps += 1
        self.node.cache.check()

    @invariant()
    def in_use_is_exactly_what_is_held(self) -> None:
        stats = self.node.cache.stats()
        assert stats.blocks.in_use == len(self.held_blocks())
        assert stats.slots.in_use == len(self.held_slots())
        assert (stats.packed is not None) == self.is_packed
        if stats.packed is not None:
            assert stats.packed.in_use == len(self.leased_slots())

    @invariant()
    def whatever_can_be_found_has_the_right_bytes(self) -> None:
        for entry in self.index.entries():
            assert self.key_of(self.node.block_bytes[entry.block]) == entry.key
        for checkpoint in self.index.checkpoints():
            contents = self.node.slot_bytes[checkpoint.slot]
            assert len(contents) == checkpoint.num_tokens
            assert self.key_of(contents) == checkpoint.key

    @invariant()
    def the_events_so_far_tell_what_can_be_found(self) -> None:
        contents = self.node.cache.contents()
        stored = {(BlockStored, key) for key in contents.blocks}
        assert set(self.heard) == stored | {(CheckpointStored, key) for key in contents.checkpoints}

    @invariant()
    def blocks_disappear_only_by_eviction(self) -> None:
        found = {entry.key for entry in self.index.entries()}
        num_evictions = self.node.cache.stats().totals.block_evictions
        assert found <= self.findable
        assert found == self.findable or num_evictions > self.num_evictions
        self.findable, self.num_evictions = found, num_evictions

    @invariant()
    def what_a_request_reuses_stays_findable(self) -> None:
        for request in self.phases:
            reused = request.claim.reused_tokens
            assert self.node.match(request.tokens, max_tokens=reused).attention_tokens == reused


@pytest.mark.slow
def test_20_000_steps_of_random_histories_keep_to_the_model() -> None:
    CacheMachine.num_steps = 0
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=400, stateful_step_count=80, deadline=None))
    assert CacheMachine.num_steps >= 20_000
