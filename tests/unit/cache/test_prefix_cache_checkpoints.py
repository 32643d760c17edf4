"""Each operation of the prefix cache on checkpoints and their slots, by itself."""

import pytest

from headrace.cache.claims import Claim
from headrace.cache.errors import MisplacedState, NotHeld
from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import PrefixHit, ReceiveState, ResumeLocally
from headrace.cache.index import Checkpoint
from headrace.cache.pools import PoolCounts
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.types import PRIMARY, Tier
from tests.support.cache.prefix_caches import KEYS, SIZE, claimed, new_cache, published


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


def test_a_checkpoint_held_for_another_node_counts_as_used_and_is_primary() -> None:
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
    assert checkpoint.tier == PRIMARY
    assert cache.stats().totals.checkpoints_used == 1
    cache.check()


def test_a_claim_at_its_share_gives_up_grid_checkpoints_before_what_another_has_resumed_from() -> None:
    cache = new_cache(num_blocks=40, num_slots=8)
    owner = claimed(cache, 20)
    cache.publish_blocks(owner, KEYS, 20)
    shallow, middle, deep = (grid_checkpoint(cache, owner, position) for position in (4, 8, 12))
    cache.release(claimed(cache, 13))  # resumes from the deepest, which is primary from now on
    assert deep.tier == PRIMARY
    others = [claimed(cache, 4, keys=[]) for _ in range(cache.stats().slots.free - 1)]
    assert cache.reserve_slot(owner) is not None  # now its checkpoints have their share, and no slot is free
    assert cache.reserve_slot(owner) is not None
    cache.check()
    assert [cache.find_checkpoint(each.key) for each in (shallow, middle, deep)] == [shallow, None, deep]
    assert len(others) == 3


def grid_checkpoint(cache: PrefixCache, claim: Claim, position: int) -> Checkpoint:
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
