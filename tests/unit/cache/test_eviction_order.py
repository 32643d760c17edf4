"""The orders in which checkpoints go, by tier and by worth; and what a policy says that they are worth."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.errors import UnknownEvictionPolicy
from headrace.cache.eviction import (
    EVICTION_POLICIES,
    REUSE_WORTHS,
    FlopAware,
    LruOrder,
    Rank,
    TieredOrder,
    UseCountOrder,
    eviction_policy,
)
from headrace.cache.types import PRIMARY, BlockId, SlotId, Tier


def order_of(**ranks: tuple[int, float]) -> tuple[TieredOrder[SlotId], dict[str, SlotId]]:
    """Slots named by letters, added in this order with these tiers and worths."""
    slots = {name: SlotId(number) for number, name in enumerate(ranks)}
    by_slot = {slots[name]: Rank(Tier(tier), worth) for name, (tier, worth) in ranks.items()}
    order: TieredOrder[SlotId] = TieredOrder(by_slot.__getitem__)
    for slot in slots.values():
        order.add(slot)
    return order, slots


def evict(order: TieredOrder[SlotId], slots: dict[str, SlotId], up_to: int = PRIMARY) -> str | None:
    first = order.first(Tier(up_to))
    if first is None:
        return None
    order.remove(first)
    return next(name for name, slot in slots.items() if slot == first)


def test_with_equal_worths_the_least_recently_used_goes_first() -> None:
    order, slots = order_of(a=(PRIMARY, 8), b=(PRIMARY, 8), c=(PRIMARY, 8))
    order.touch(slots["a"])
    assert [evict(order, slots) for _ in range(4)] == ["b", "c", "a", None]


def test_lower_tiers_go_first_whatever_they_are_worth() -> None:
    order, slots = order_of(a=(PRIMARY, 1), b=(1, 1000), c=(0, 10), d=(1, 10))
    assert list(order) == [slots[name] for name in "cdba"]
    assert [evict(order, slots) for _ in range(4)] == ["c", "d", "b", "a"]


def test_a_grid_checkpoint_takes_no_slot_above_its_tier() -> None:
    order, slots = order_of(a=(PRIMARY, 1), b=(2, 1))
    assert evict(order, slots, up_to=1) is None
    assert evict(order, slots, up_to=2) == "b"
    assert evict(order, slots, up_to=5) is None


def test_what_saves_more_stays_longer_but_not_for_ever() -> None:
    order, slots = order_of(big=(PRIMARY, 1024))
    small = [SlotId(number) for number in range(1, 100)]
    order._rank = lambda slot: Rank(PRIMARY, 1024 if slot == slots["big"] else 128)
    survived = 0
    for slot in small:  # a stream of small ones through a pool of two
        order.add(slot)
        first = order.first()
        assert first is not None
        order.remove(first)
        if first == slots["big"]:
            break
        survived += 1
    # Each small one that goes moves the clock on by its worth.
    assert survived in (1024 / 128 - 1, 1024 / 128)


def test_use_makes_it_young_again() -> None:
    order, slots = order_of(a=(PRIMARY, 4), b=(PRIMARY, 4), c=(PRIMARY, 4))
    assert evict(order, slots) == "a"
    order.touch(slots["b"])
    assert [evict(order, slots), evict(order, slots)] == ["c", "b"]


@given(st.lists(st.tuples(st.integers(0, PRIMARY), st.floats(1, 1e9)), max_size=30))
def test_iteration_is_the_order_of_eviction(ranks: list[tuple[int, float]]) -> None:
    order: TieredOrder[SlotId] = TieredOrder(lambda slot: Rank(Tier(ranks[slot][0]), ranks[slot][1]))
    for number in range(len(ranks)):
        order.add(SlotId(number))
    expected = list(order)
    assert len(order) == len(expected) == len(ranks)
    evicted = []
    while (first := order.first()) is not None:
        assert first in order
        order.remove(first)
        evicted.append(first)
    assert evicted == expected


def test_worth_is_what_the_checkpoint_saves() -> None:
    assert FlopAware().worth(512, 1536) == 1024
    # Where attention costs as much as all else, a token costs double; its mean over the stretch counts.
    assert FlopAware(attention_parity_position=1000).worth(0, 1000) == 1500
    assert FlopAware(attention_parity_position=1000).worth(1000, 2000) == 2500
    assert eviction_policy("lru").worth(0, 10) == eviction_policy("lru").worth(0, 100_000)


def test_an_unknown_policy_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UnknownEvictionPolicy, match="'fifo' is unknown: use one of lru, flop_aware, reuse_aware"):
        eviction_policy("fifo", math.inf)


def used(order: UseCountOrder[BlockId], block: int, times: int) -> None:
    for _ in range(times):
        order.count_use(BlockId(block))
    order.add(BlockId(block))


def evicted(order: UseCountOrder[BlockId]) -> int:
    block = order.first()
    assert block is not None
    order.remove(block)
    order.forget(block)
    return block


def test_a_block_that_many_requests_used_outlives_later_ones_that_one_request_used() -> None:
    order: UseCountOrder[BlockId] = UseCountOrder(10)
    used(order, 0, times=2)
    for block in range(1, 4):
        used(order, block, times=1)
    assert list(order) == [1, 2, 3, 0]
    assert [evicted(order) for _ in range(3)] == [1, 2, 3]


def test_it_is_evicted_in_its_turn_however_often_it_was_used() -> None:
    order: UseCountOrder[BlockId] = UseCountOrder(10)
    used(order, 0, times=9)
    rounds = 0
    while True:  # a cache of two blocks, the other one new each time
        used(order, 1, times=1)
        if evicted(order) == 0:
            break
        rounds += 1
    assert rounds == REUSE_WORTHS[-1]


def test_the_clock_goes_on_to_the_last_of_many_that_go_at_once() -> None:
    order: UseCountOrder[BlockId] = UseCountOrder(10)
    used(order, 0, times=1)
    used(order, 1, times=2)
    used(order, 2, times=3)
    assert order.pop(2) == [0, 1]
    used(order, 3, times=2)  # kept as long as the second one was, from now on; of the third's time less is left
    assert order.pop(2) == [2, 3]


def test_a_block_with_new_contents_has_been_used_by_nobody() -> None:
    order: UseCountOrder[BlockId] = UseCountOrder(10)
    used(order, 0, times=5)
    assert evicted(order) == 0
    used(order, 0, times=1)
    used(order, 1, times=1)
    assert list(order) == [0, 1]


@pytest.mark.parametrize("order_of", [LruOrder, UseCountOrder])
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6), st.integers(0, 4)), max_size=40))
def test_many_go_at_once_as_they_would_one_by_one(
    order_of: Callable[[int], LruOrder[BlockId] | UseCountOrder[BlockId]], rounds: list[tuple[int, int, int]]
) -> None:
    """Each round uses one block some times and evicts some."""
    at_once, one_by_one = order_of(21), order_of(21)
    for number, times, num_evicted in rounds:
        block = BlockId(number)
        for order in (at_once, one_by_one):
            for _ in range(times):
                order.count_use(block)
            if block in order:
                order.touch(block)
            else:
                order.add(block)
        evicted = at_once.pop(num_evicted)
        for each in evicted:
            assert one_by_one.first() == each
            one_by_one.remove(each)
            for order in (at_once, one_by_one):
                order.forget(each)
        assert len(evicted) == num_evicted or not len(one_by_one)
        assert list(at_once) == list(one_by_one)


def test_blocks_are_kept_by_recency_unless_reuse_counts() -> None:
    kinds = {name: type(eviction_policy(name).block_order(4)) for name in EVICTION_POLICIES}
    assert kinds == {"lru": LruOrder, "flop_aware": LruOrder, "reuse_aware": UseCountOrder}
