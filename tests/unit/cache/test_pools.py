import pytest

from headrace.cache.errors import CorruptCache, NotHeld
from headrace.cache.eviction import LruOrder
from headrace.cache.pools import BlockPool, PoolCounts, StatePool
from headrace.cache.types import BlockId


def pool_with_cached(num_cached: int, total: int = 4) -> tuple[BlockPool, list[BlockId]]:
    """A pool whose first `num_cached` blocks are cached, the first the oldest."""
    pool = BlockPool(total, LruOrder(total))
    blocks = pool.reserve(num_cached)
    assert blocks is not None
    for block in blocks:
        pool.cache(block)
        pool.drop(block)
    return pool, blocks


def test_reserve_takes_distinct_free_ids_or_nothing() -> None:
    pool = BlockPool(4, LruOrder(4))
    first = pool.reserve(3)
    assert first is not None and len(set(first)) == 3
    assert pool.reserve(2) is None
    assert pool.counts() == PoolCounts(free=1, cached=0, in_use=3)
    assert pool.reserve(0) == []
    last = pool.reserve(1)
    assert last is not None and set(first + last) == set(range(4))
    pool.check()


def test_an_id_is_free_again_with_its_last_reference() -> None:
    pool = StatePool(range(2), LruOrder(2))
    (slot,) = pool.reserve(1) or []
    pool.acquire(slot)
    pool.drop(slot)
    assert pool.is_referenced(slot) and pool.num_free == 1
    pool.drop(slot)
    assert not pool.is_referenced(slot) and pool.num_free == 2
    pool.check()


def test_a_cached_id_stays_cached_when_let_go_and_is_in_use_when_acquired() -> None:
    pool, (block,) = pool_with_cached(1)
    assert pool.counts() == PoolCounts(free=3, cached=1, in_use=0)
    assert pool.is_indexed(block) and pool.indexed() == {block}
    pool.acquire(block)
    assert pool.counts() == PoolCounts(free=3, cached=0, in_use=1)
    assert pool.first() is None
    pool.check()


def test_the_first_to_go_is_the_one_let_go_longest_ago() -> None:
    pool, (first, second, third) = pool_with_cached(3)
    assert pool.first() == first
    pool.touch(first)
    assert pool.unused() == [second, third, first]
    pool.acquire(second)
    pool.touch(second)  # in use: nothing to order
    assert pool.unused() == [third, first]
    pool.drop(second)
    assert pool.unused() == [third, first, second]
    pool.check()


def test_an_uncached_id_is_free_at_once_or_with_its_last_reference() -> None:
    pool, (unused, used) = pool_with_cached(2)
    pool.acquire(used)
    pool.uncache(unused)
    assert pool.num_free == 3
    pool.uncache(used)
    assert pool.counts() == PoolCounts(free=3, cached=0, in_use=1)
    pool.check()
    pool.drop(used)
    assert pool.counts() == PoolCounts(free=4, cached=0, in_use=0)
    pool.check()


def test_capacity_counts_ids_that_eviction_would_free_but_not_those_that_must_stay() -> None:
    pool, (first, second) = pool_with_cached(2)
    (held,) = pool.reserve(1) or []
    assert pool.capacity() == 3
    assert pool.capacity(keeping=[first]) == 2
    assert pool.capacity(keeping=[held, first, second]) == 1


def test_misuse_is_refused_and_changes_nothing() -> None:
    pool, (cached,) = pool_with_cached(1)
    (held,) = pool.reserve(1) or []
    (free,) = set(range(4)) - {cached, held} - {3}
    before = pool.counts()
    for misuse in (
        lambda: pool.acquire(BlockId(free)),
        lambda: pool.drop(BlockId(free)),
        lambda: pool.drop(cached),
        lambda: pool.cache(BlockId(free)),
        lambda: pool.cache(cached),
        lambda: pool.uncache(held),
    ):
        with pytest.raises(NotHeld, match="BlockPool: "):
            misuse()
        assert pool.counts() == before
        pool.check()


def test_caching_twice_is_refused() -> None:
    pool = BlockPool(1, LruOrder(1))
    (block,) = pool.reserve(1) or []
    pool.cache(block)
    with pytest.raises(NotHeld, match="already cached"):
        pool.cache(block)


@pytest.mark.parametrize("damage", ["lost", "free twice", "free and indexed", "cached and not indexed"])
def test_check_finds_damage(damage: str) -> None:
    pool, (block,) = pool_with_cached(1)
    if damage == "lost":
        pool._free.pop()
    elif damage == "free twice":
        pool._free.append(pool._free[0])
    elif damage == "free and indexed":
        pool._indexed[pool._free[0]] = True
    else:
        pool._indexed[block] = False
    with pytest.raises(CorruptCache):
        pool.check()


def test_evicted_blocks_are_free_and_the_oldest_go_first() -> None:
    pool, blocks = pool_with_cached(3)
    pool.acquire(blocks[0])
    assert pool.evict(1) == blocks[1:2]
    assert pool.counts() == PoolCounts(free=2, cached=1, in_use=1)
    assert pool.evict(5) == blocks[2:]
    assert pool.indexed() == {blocks[0]}
    pool.check()
