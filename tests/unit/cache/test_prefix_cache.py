"""Each operation of the prefix cache, by itself."""


import pytest

from cache.claims import Claim
from cache.errors import BadTokens, MisplacedState, NotHeld
from cache.hashing import prefix_keys
from cache.hits import HitPolicy, PrefixHit, ReceiveState, ResumeAgain, ResumeLocally
from cache.index import Checkpoint
from cache.pools import PoolCounts
from cache.prefix_cache import PrefixCache
from cache.types import FIRM, PrefixKey, Tier

SIZE = 4
KEYS = prefix_keys(range(40), SIZE)


def new_cache(num_blocks: int = 8, num_slots: int = 4) -> PrefixCache:
    return PrefixCache(num_blocks=num_blocks, num_slots=num_slots, block_size=SIZE)


def claimed(
    cache: PrefixCache, num_tokens: int, keys: list[PrefixKey] = KEYS, policy: HitPolicy | None = None
) -> Claim:
    policy = policy or ResumeLocally()
    claim = cache.claim(
        keys, num_tokens=num_tokens, hit_policy=policy, max_reuse_tokens=policy.reuse_limit(num_tokens)
    )
    cache.check()
    assert claim is not None
    return claim


def published(cache: PrefixCache, num_tokens: int, *checkpoints: int, keys: list[PrefixKey] = KEYS) -> None:
    """A finished request that left its blocks, and checkpoints at the given positions."""
    claim = claimed(cache, num_tokens, keys)
    cache.publish_blocks(claim, keys, num_tokens)
    for position in checkpoints:
        slot = cache.reserve_slot(claim)
        assert slot is not None
        cache.publish_checkpoint(claim, keys[position // SIZE - 1], position, slot)
    cache.release(claim)
    cache.check()


@pytest.mark.parametrize("field", ["num_blocks", "num_slots", "block_size"])
def test_a_size_below_one_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1, not 0"):
        PrefixCache(**{"num_blocks": 8, "num_slots": 4, "block_size": 4, field: 0})


def test_match_is_limited_by_keys_and_tokens_and_changes_nothing() -> None:
    cache = new_cache()
    published(cache, 20, 8, 16)
    before = cache.stats()
    assert cache.match(KEYS, max_tokens=40) == PrefixHit(20, 16, 16)
    assert cache.match(KEYS, max_tokens=19) == PrefixHit(16, 16, 16)
    assert cache.match(KEYS, max_tokens=15) == PrefixHit(12, 8, 8)
    assert cache.match(KEYS[:1], max_tokens=40) == PrefixHit(4, 0, 0)
    assert cache.match(KEYS, max_tokens=0) == cache.match([], max_tokens=40) == PrefixHit(0, 0, 0)
    assert cache.stats() == before


def test_match_does_not_save_a_prefix_from_eviction() -> None:
    cache = new_cache(num_blocks=4)
    other = prefix_keys(range(100, 108), SIZE)
    published(cache, 8, keys=KEYS)
    published(cache, 8, keys=other)
    cache.match(KEYS, max_tokens=8)
    claimed(cache, 8, keys=[])
    assert cache.match(KEYS, max_tokens=8).attention_tokens == 0
    assert cache.match(other, max_tokens=8).attention_tokens == 8


def test_claim_shares_the_resumed_prefix_and_reserves_the_rest() -> None:
    cache = new_cache()
    published(cache, 16, 8)
    claim = claimed(cache, 18)
    assert (claim.reused_tokens, claim.junction) == (8, 16)
    assert claim.hit == PrefixHit(16, 8, 8)
    assert len(claim.block_ids) == len(set(claim.block_ids)) == 5
    assert claim.source is not None and claim.source.num_tokens == 8
    assert claim.source_slot is not None and claim.source_slot != claim.slot
    sibling = claimed(cache, 8 + 4)
    assert sibling.block_ids[:2] == claim.block_ids[:2]
    assert not set(sibling.block_ids[2:]) & set(claim.block_ids)


def test_a_partial_last_block_is_never_shared() -> None:
    cache = new_cache()
    published(cache, 10)
    assert cache.match(KEYS, max_tokens=10).attention_tokens == 8


@pytest.mark.parametrize("lacking", ["blocks", "slots"])
def test_a_claim_without_room_is_none_and_changes_nothing(lacking: str) -> None:
    cache = new_cache(num_blocks=5, num_slots=2)
    published(cache, 16, 8)
    if lacking == "blocks":
        num_tokens, reader = 21, None  # 2 shared and 4 new blocks of the 3 left
    else:
        num_tokens, reader = 12, claimed(cache, 12)  # holds the checkpoint and the other slot
    before, order = cache.stats(), cache._storage.blocks.unused()
    claim = cache.claim(
        KEYS, num_tokens=num_tokens, hit_policy=ResumeLocally(), max_reuse_tokens=num_tokens - 1
    )
    assert claim is None
    assert cache.stats() == before
    assert cache._storage.blocks.unused() == order
    cache.check()
    if reader is not None:
        cache.release(reader)
        assert claimed(cache, num_tokens).reused_tokens == 8


def test_what_a_claim_reuses_does_not_count_as_room_for_it() -> None:
    cache = new_cache(num_blocks=4, num_slots=3)
    published(cache, 16, 16)
    assert cache.claim(KEYS, num_tokens=17, hit_policy=ResumeLocally(), max_reuse_tokens=16) is None
    assert cache.match(KEYS, max_tokens=16) == PrefixHit(16, 16, 16)
    assert cache.claim([], num_tokens=16, hit_policy=ResumeLocally(), max_reuse_tokens=15) is not None


def test_a_claim_may_evict_every_other_checkpoint_but_its_own() -> None:
    cache = new_cache(num_blocks=8, num_slots=2)
    published(cache, 8, 8)
    claim = claimed(cache, 12)
    assert claim.source is not None
    assert cache.reserve_slot(claim) is None
    cache.state_written(claim)
    assert cache.reserve_slot(claim) == 1 - claim.slot


def test_extend_grows_to_the_tokens_asked_for_or_not_at_all() -> None:
    cache = new_cache(num_blocks=4)
    claim = claimed(cache, 5)
    assert cache.extend(claim, 8) and len(claim.block_ids) == 2
    assert cache.extend(claim, 9) and len(claim.block_ids) == 3
    assert cache.extend(claim, 1) and len(claim.block_ids) == 3
    before = list(claim.block_ids)
    assert not cache.extend(claim, 17)
    assert claim.block_ids == before
    assert cache.stats().blocks == PoolCounts(free=1, cached=0, in_use=3)


def test_blocks_are_published_once_they_are_full() -> None:
    cache = new_cache()
    claim = claimed(cache, 11)
    for num_computed, found in ((3, 0), (4, 4), (7, 4), (11, 8)):
        cache.publish_blocks(claim, KEYS, num_computed)
        assert cache.match(KEYS, max_tokens=40).attention_tokens == found
        cache.check()


def test_publishing_needs_a_block_and_a_key_for_what_was_computed() -> None:
    cache = new_cache()
    claim = claimed(cache, 8)
    with pytest.raises(BadTokens, match="12 computed tokens fill 3 blocks, but the claim has 2 blocks"):
        cache.publish_blocks(claim, KEYS, 12)
    with pytest.raises(BadTokens, match="1 keys"):
        cache.publish_blocks(claim, KEYS[:1], 8)
    assert cache.match(KEYS, max_tokens=40).attention_tokens == 0


def test_a_known_key_keeps_its_first_block_and_the_copy_is_free_after_release() -> None:
    cache = new_cache()
    first, second = claimed(cache, 8), claimed(cache, 12)
    cache.publish_blocks(first, KEYS, 8)
    cache.publish_blocks(second, KEYS, 12)
    third = claimed(cache, 12, policy=ReceiveState())
    assert third.block_ids == [*first.block_ids, second.block_ids[2]]
    cache.release(third)
    cache.release(second)
    assert cache.stats().blocks == PoolCounts(free=5, cached=1, in_use=2)
    cache.release(first)
    assert cache.stats().blocks == PoolCounts(free=5, cached=3, in_use=0)
    cache.check()


def test_a_checkpoint_needs_blocks_below_it() -> None:
    cache = new_cache()
    claim = claimed(cache, 8)
    slot = cache.reserve_slot(claim)
    assert slot is not None
    assert cache.publish_checkpoint(claim, KEYS[1], 8, slot) is None
    assert cache.stats().slots == PoolCounts(free=3, cached=0, in_use=1)


def test_a_second_checkpoint_at_one_place_gives_its_slot_back() -> None:
    cache = new_cache()
    published(cache, 8, 8)
    claim = claimed(cache, 12)
    slot = cache.reserve_slot(claim)
    assert slot is not None
    assert cache.publish_checkpoint(claim, KEYS[1], 8, slot) is None
    cache.release(claim)
    assert cache.stats().slots == PoolCounts(free=3, cached=1, in_use=0)
    assert cache.stats().totals.checkpoints_published == 1


def test_a_checkpoint_under_a_key_of_another_length_is_refused() -> None:
    cache = new_cache()
    published(cache, 12)
    claim = claimed(cache, 12)
    slot = cache.reserve_slot(claim)
    assert slot is not None
    with pytest.raises(MisplacedState, match="a state of 12 tokens came with a key of 8"):
        cache.publish_checkpoint(claim, KEYS[1], 12, slot)
    cache.release_slot(claim, slot)
    cache.check()


def test_a_reserved_slot_can_be_given_back_once_and_a_published_one_not() -> None:
    cache = new_cache()
    published(cache, 4)
    claim = claimed(cache, 8)
    slot = cache.reserve_slot(claim)
    assert slot is not None
    assert cache.publish_checkpoint(claim, KEYS[0], 4, slot) is not None
    with pytest.raises(NotHeld, match="unpublish"):
        cache.release_slot(claim, slot)
    other = cache.reserve_slot(claim)
    assert other is not None
    cache.release_slot(claim, other)
    with pytest.raises(NotHeld):
        cache.release_slot(claim, other)


def test_a_donated_state_is_read_next_and_another_slot_written() -> None:
    cache = new_cache()
    claim = claimed(cache, 9)
    cache.publish_blocks(claim, KEYS, 8)
    running = claim.slot
    assert cache.donate_running(claim, KEYS[1], 8)
    assert claim.source_slot == running != claim.slot
    assert cache.match(KEYS, max_tokens=40).resumable_tokens == 8
    assert cache.stats().slots == PoolCounts(free=2, cached=0, in_use=2)
    cache.state_written(claim)
    assert claim.source_slot is None
    assert cache.stats().slots == PoolCounts(free=2, cached=1, in_use=1)
    cache.state_written(claim)  # after a step without a source
    cache.release(claim)
    assert cache.stats().slots == PoolCounts(free=3, cached=1, in_use=0)
    cache.check()


@pytest.mark.parametrize("reason", ["no slot", "checkpoint there", "blocks unknown"])
def test_a_donation_that_cannot_be_changes_nothing(reason: str) -> None:
    cache = new_cache(num_slots=2)
    if reason == "checkpoint there":
        published(cache, 8, 8)
    claim = claimed(cache, 9, policy=ReceiveState())
    if reason != "blocks unknown":
        cache.publish_blocks(claim, KEYS, 8)
    if reason == "no slot":
        assert cache.reserve_slot(claim) is not None
    slot, before = claim.slot, cache.stats()
    assert not cache.donate_running(claim, KEYS[1], 8)
    assert (claim.slot, claim.source, cache.stats()) == (slot, None, before)
    cache.check()


def test_a_slot_that_is_not_written_yet_cannot_be_donated() -> None:
    cache = new_cache()
    published(cache, 16, 8)
    claim = claimed(cache, 17)
    with pytest.raises(MisplacedState, match="before state_written"):
        cache.donate_running(claim, KEYS[3], 16)


def test_unpublish_frees_a_checkpoint_that_nobody_reads() -> None:
    cache = new_cache()
    published(cache, 8, 8)
    reader = claimed(cache, 12)
    checkpoint = reader.source
    assert checkpoint is not None
    assert not cache.unpublish(checkpoint)
    cache.state_written(reader)
    assert cache.unpublish(checkpoint)
    assert cache.match(KEYS, max_tokens=40) == PrefixHit(8, 0, 0)
    assert cache.stats().slots == PoolCounts(free=3, cached=0, in_use=1)
    assert not cache.unpublish(checkpoint)
    cache.check()


def test_unpublish_does_not_mistake_a_later_checkpoint_in_the_same_slot() -> None:
    cache = new_cache(num_slots=2)
    published(cache, 8, 8)
    old = claimed(cache, 12)
    checkpoint = old.source
    assert checkpoint is not None
    cache.release(old)
    assert cache.unpublish(checkpoint)
    other = prefix_keys(range(100, 108), SIZE)
    published(cache, 8, 4, 8, keys=other)
    assert not cache.unpublish(checkpoint)
    assert cache.match(other, max_tokens=40).state_tokens == 8


def test_a_hold_keeps_a_checkpoint_and_its_blocks_after_the_request_is_gone() -> None:
    cache = new_cache(num_blocks=4)
    published(cache, 13, 12)
    (checkpoint,) = [entry.checkpoint for entry in cache._storage.index.entries() if entry.checkpoint is not None]
    hold = cache.hold_checkpoint(checkpoint)
    assert hold is not None
    assert cache.stats().blocks == PoolCounts(free=1, cached=0, in_use=3)
    assert cache.stats().slots.in_use == 1
    assert cache.claim([], num_tokens=8, hit_policy=ResumeLocally(), max_reuse_tokens=0) is None
    cache.drop(hold)
    assert cache.stats().blocks == PoolCounts(free=1, cached=3, in_use=0)
    cache.check()
    with pytest.raises(NotHeld, match="dropped already"):
        cache.drop(hold)


def test_a_request_that_goes_on_after_a_preemption_is_no_second_lookup() -> None:
    cache = new_cache()
    published(cache, 12, 8)
    before = cache.stats().totals
    again = claimed(cache, 13, policy=ResumeAgain())
    assert again.reused_tokens == 8
    assert cache.stats().totals.lookups == before.lookups
    assert cache.stats().totals.reused_tokens == before.reused_tokens


def test_a_checkpoint_held_for_another_node_counts_as_used_and_is_firm() -> None:
    cache = new_cache()
    claim = claimed(cache, 8)
    cache.publish_blocks(claim, KEYS, 8)
    slot = cache.reserve_slot(claim, Tier(0))
    assert slot is not None
    checkpoint = cache.publish_checkpoint(claim, KEYS[1], 8, slot, Tier(0))
    cache.release(claim)
    assert checkpoint is not None
    hold = cache.hold_checkpoint(checkpoint)
    assert hold is not None
    cache.drop(hold)
    assert checkpoint.tier == FIRM
    assert cache.stats().totals.checkpoints_used == 1
    cache.check()


def test_a_claim_at_its_share_gives_up_what_is_spare_before_what_another_has_resumed_from() -> None:
    cache = new_cache(num_blocks=40, num_slots=8)
    owner = claimed(cache, 20)
    cache.publish_blocks(owner, KEYS, 20)
    shallow, middle, deep = (spare_checkpoint(cache, owner, position) for position in (4, 8, 12))
    cache.release(claimed(cache, 13))  # resumes from the deepest, which is firm from now on
    assert deep.tier == FIRM
    others = [claimed(cache, 4, keys=[]) for _ in range(cache.stats().slots.free - 1)]
    assert cache.reserve_slot(owner) is not None  # now its checkpoints have their share, and no slot is free
    assert cache.reserve_slot(owner) is not None
    cache.check()
    assert [cache.find_checkpoint(each.key) for each in (shallow, middle, deep)] == [shallow, None, deep]
    assert len(others) == 3


def spare_checkpoint(cache: PrefixCache, claim: Claim, position: int) -> Checkpoint:
    slot = cache.reserve_slot(claim, Tier(2))
    assert slot is not None
    checkpoint = cache.publish_checkpoint(claim, KEYS[position // SIZE - 1], position, slot, Tier(2))
    assert checkpoint is not None
    return checkpoint


def test_a_checkpoint_that_is_gone_cannot_be_held() -> None:
    cache = new_cache()
    published(cache, 8, 8)
    claim = claimed(cache, 12)
    checkpoint = claim.source
    assert checkpoint is not None
    cache.release(claim)
    cache.unpublish(checkpoint)
    assert cache.hold_checkpoint(checkpoint) is None


def test_a_checkpoint_is_found_by_the_key_of_its_prefix_alone() -> None:
    cache = new_cache()
    published(cache, 12, 8)
    found = cache.find_checkpoint(KEYS[1])
    assert found is not None and found.num_tokens == 8
    assert cache.find_checkpoint(KEYS[2]) is None, "a block, but no checkpoint"
    assert cache.find_checkpoint(KEYS[3]) is None, "nothing"


def test_a_second_release_raises() -> None:
    cache = new_cache()
    claim = claimed(cache, 8)
    cache.release(claim)
    with pytest.raises(NotHeld, match="released already"):
        cache.release(claim)


def test_the_totals_tell_the_groups_apart() -> None:
    cache = new_cache(num_blocks=5, num_slots=3)
    published(cache, 16, 4, 8)
    claim = claimed(cache, 17)
    cache.release(claim)
    assert cache.claim([], num_tokens=100, hit_policy=ResumeLocally(), max_reuse_tokens=99) is None
    released = claimed(cache, 20, keys=[])
    totals = cache.stats().totals
    assert (totals.lookups, totals.looked_up_tokens) == (3, 15 + 16 + 19)
    assert (totals.attention_hit_tokens, totals.state_hit_tokens) == (16, 8)
    assert (totals.resumable_tokens, totals.reused_tokens) == (8, 8)
    assert totals.block_evictions == 4
    assert (totals.checkpoints_published, totals.checkpoints_used) == (2, 1)
    assert (totals.checkpoints_evicted, totals.checkpoints_evicted_unused) == (2, 1)
    cache.release(released)
    assert totals == cache.stats().totals
