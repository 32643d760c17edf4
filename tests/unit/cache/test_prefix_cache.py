"""Each operation of the prefix cache on blocks and claims, by itself."""

import pytest

from headrace.cache.errors import BadTokens, NotHeld
from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import PrefixHit, ReceiveState, ResumeAgain, ResumeLocally
from headrace.cache.pools import PoolCounts
from headrace.cache.prefix_cache import PrefixCache
from tests.support.cache.prefix_caches import KEYS, SIZE, claimed, new_cache, published


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
    assert (claim.reused_tokens, claim.branch_point) == (8, 16)
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
def test_a_claim_that_does_not_fit_is_none_and_changes_nothing(lacking: str) -> None:
    cache = new_cache(num_blocks=5, num_slots=2)
    published(cache, 16, 8)
    if lacking == "blocks":
        num_tokens, reader = 21, None  # 2 shared and 4 new blocks of the 3 left
    else:
        num_tokens, reader = 12, claimed(cache, 12)  # holds the checkpoint and the other slot
    before, order = cache.stats(), cache._storage.blocks.unused()
    claim = cache.claim(KEYS, num_tokens=num_tokens, hit_policy=ResumeLocally(), max_reuse_tokens=num_tokens - 1)
    assert claim is None
    assert cache.stats() == before
    assert cache._storage.blocks.unused() == order
    cache.check()
    if reader is not None:
        cache.release(reader)
        assert claimed(cache, num_tokens).reused_tokens == 8


def test_blocks_that_a_claim_reuses_do_not_count_as_capacity_for_it() -> None:
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


def test_a_request_that_goes_on_after_a_preemption_is_no_second_lookup() -> None:
    cache = new_cache()
    published(cache, 12, 8)
    before = cache.stats().totals
    again = claimed(cache, 13, policy=ResumeAgain())
    assert again.reused_tokens == 8
    assert cache.stats().totals.lookups == before.lookups
    assert cache.stats().totals.reused_tokens == before.reused_tokens


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
