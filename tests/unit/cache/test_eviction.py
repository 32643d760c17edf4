"""Eviction order when the pools are full, and the fate of entries whose prefix was evicted."""

import pytest

from headrace.cache.eviction import EVICTION_POLICIES
from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import PrefixHit, ReceiveState, ResumeLocally
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.types import BlockId, PrefixKey
from tests.support.cache.cache_node import FakeNode

SIZE = 16


def text(num_blocks: int, kind: int) -> list[int]:
    return [kind * 1000 + position for position in range(num_blocks * SIZE)]


def take_blocks(node: FakeNode, num: int) -> None:
    """Make others want `num` blocks more than are free, for a moment."""
    num_tokens = (node.cache.stats().blocks.free + num) * SIZE
    claim = node.cache.claim([], num_tokens=num_tokens, hit_policy=ResumeLocally(), max_reuse_tokens=0)
    assert claim is not None
    node.cache.release(claim)
    node.cache.check()


def attention(node: FakeNode, tokens: list[int]) -> int:
    return node.match(tokens).attention_tokens // SIZE


def test_a_prefix_loses_its_suffix_first() -> None:
    node = FakeNode(policy="every", num_blocks=4)
    node.serve(text(4, 1))
    for left in (3, 2, 1, 0):
        take_blocks(node, 1)
        assert node.match(text(4, 1)) == PrefixHit(left * SIZE, left * SIZE, left * SIZE)


def test_the_least_recently_used_prefix_goes_first() -> None:
    node = FakeNode(num_blocks=6)
    for kind in (1, 2, 3):
        node.serve(text(2, kind))
    node.serve(text(2, 1))  # used again: now the newest
    take_blocks(node, 2)
    assert [attention(node, text(2, kind)) for kind in (1, 2, 3)] == [2, 0, 2]


def test_a_shared_start_outlives_its_branches() -> None:
    node = FakeNode(policy="every", num_blocks=6)
    start = text(2, 1)
    node.serve(start + text(2, 2))
    node.serve(start + text(2, 3))
    take_blocks(node, 4)
    assert attention(node, start + text(2, 2)) == attention(node, start + text(2, 3)) == 2


def test_a_checkpoint_goes_with_the_block_below_it_but_a_block_outlives_its_checkpoint() -> None:
    node = FakeNode(policy="every", num_blocks=3, num_slots=4)
    node.serve(text(3, 1))
    assert node.cache.stats().slots.cached == 3
    take_blocks(node, 2)
    assert node.cache.stats().slots.cached == 1
    node.evict_states(1)
    assert node.match(text(3, 1)) == PrefixHit(SIZE, 0, 0)


def test_states_are_evicted_by_last_use_not_by_position() -> None:
    node = FakeNode(num_slots=4)
    node.serve([*text(2, 1), 0])
    node.serve([*text(2, 2), 0])
    node.serve([*text(2, 1), 0])
    node.evict_states(1)
    assert node.match(text(2, 1)).state_tokens == 2 * SIZE
    assert node.match(text(2, 2)) == PrefixHit(2 * SIZE, 0, 0)


def test_giving_back_a_private_copy_renews_the_indexed_block_it_is_a_copy_of() -> None:
    node = FakeNode(policy="none", num_blocks=8)
    node.serve(text(2, 1))
    node.serve(text(2, 2))
    copier = node.admit(text(2, 1))
    assert copier is not None and copier.claim.reused_tokens == 0
    node.prefill(copier)
    node.finish(copier)
    take_blocks(node, 2)
    assert (attention(node, text(2, 1)), attention(node, text(2, 2))) == (2, 0)


class Siblings:
    """Two requests that computed the same four blocks, of which the first's are indexed and then evicted.

    The second has published one block of its own below them, whose prefix is thereby lost.
    """

    keys = prefix_keys(text(6, 1), SIZE)

    def __init__(self) -> None:
        self.cache = cache = PrefixCache(num_blocks=10, num_slots=4, block_size=SIZE)
        first = self.claim(4)
        self.second = self.claim(5)
        cache.publish_blocks(first, self.keys, 4 * SIZE)
        cache.publish_blocks(self.second, self.keys, 5 * SIZE)
        cache.release(first)
        assert self.found() == 5
        other = self.claim(2, keys=[])  # one block is free, so this evicts the first's last block
        cache.release(other)
        cache.check()

    def claim(self, num_blocks: int, keys: list[PrefixKey] | None = None):
        claim = self.cache.claim(
            self.keys if keys is None else keys,
            num_tokens=num_blocks * SIZE,
            hit_policy=ResumeLocally(),
            max_reuse_tokens=num_blocks * SIZE - 1,
        )
        assert claim is not None
        return claim

    def found(self) -> int:
        return self.cache.match(self.keys, max_tokens=6 * SIZE).attention_tokens // SIZE

    def blocks(self) -> list[BlockId]:
        received = self.cache.claim(self.keys, num_tokens=SIZE, hit_policy=ReceiveState(), max_reuse_tokens=6 * SIZE)
        assert received is not None
        self.cache.release(received)
        return received.block_ids


def test_blocks_below_an_evicted_one_are_forgotten_even_in_use() -> None:
    siblings = Siblings()
    assert siblings.found() == 3
    assert siblings.cache.stats().blocks.in_use == 5


def test_a_request_that_lost_its_prefix_publishes_its_own_copies_with_its_next_block() -> None:
    siblings = Siblings()
    cache, second = siblings.cache, siblings.second
    shared = siblings.blocks()
    assert cache.extend(second, 6 * SIZE)
    cache.publish_blocks(second, siblings.keys, 6 * SIZE)
    cache.check()
    assert siblings.found() == 6
    assert siblings.blocks() == shared + second.block_ids[3:]
    cache.release(second)
    cache.check()
    assert cache.stats().blocks.cached == 6


def test_a_request_that_lost_its_prefix_gives_everything_back() -> None:
    siblings = Siblings()
    siblings.cache.release(siblings.second)
    siblings.cache.check()
    stats = siblings.cache.stats()
    assert (stats.blocks.free, stats.blocks.cached, stats.blocks.in_use) == (7, 3, 0)


def test_a_checkpoint_read_by_a_request_survives_the_loss_of_its_prefix_until_it_was_read() -> None:
    siblings = Siblings()
    cache, second = siblings.cache, siblings.second
    assert not cache.donate_running(second, siblings.keys[4], 5 * SIZE)  # its blocks are not findable
    assert cache.donate_running(second, siblings.keys[2], 3 * SIZE)
    source, free = second.source_slot, cache.stats().slots.free
    cache.release(siblings.claim(5, keys=[]))  # the first's other blocks go, and the checkpoint with them
    cache.check()
    assert siblings.found() == 0
    assert second.source_slot == source and cache.stats().slots.free == free
    cache.state_written(second)
    assert cache.stats().slots.free == free + 1
    cache.check()


def test_grid_checkpoints_take_only_slots_that_no_primary_one_needs() -> None:
    node = FakeNode(num_slots=5, checkpoint_grid_tokens=SIZE)
    node.serve(text(9, 1))  # 16 .. 112 grid, 128 primary: those that found a slot beside the running one
    assert node.cache.stats().slots.cached == 4
    for kind in (2, 3, 4):
        node.serve(text(2, kind))
    assert node.match(text(9, 1)).state_tokens == 8 * SIZE
    assert [node.match(text(2, kind)).state_tokens for kind in (2, 3, 4)] == [SIZE, SIZE, SIZE]


def test_a_grid_checkpoint_that_somebody_resumed_from_is_primary() -> None:
    node = FakeNode(num_slots=4, checkpoint_grid_tokens=SIZE, eviction="lru")
    node.serve(text(4, 1))  # grid at 16 and 32, primary at 48
    node.serve(text(2, 1) + text(1, 2))  # resumes at 32 and leaves no other
    node.serve(text(2, 3))
    node.serve(text(2, 4))
    assert node.match(text(2, 1)).state_tokens == 2 * SIZE


@pytest.mark.parametrize("chunk_blocks", [1, 4, 25, 100])
def test_one_long_prompt_does_not_drive_out_the_checkpoints_of_others(chunk_blocks: int) -> None:
    node = FakeNode(policy="every", num_blocks=200, num_slots=16)
    for kind in (1, 2, 3):
        node.serve(text(2, kind))
    node.cache.check()
    long = node.admit(text(100, 9))
    assert long is not None
    node.prefill(long, chunk=chunk_blocks * SIZE)
    node.finish(long)
    kept = [node.match(text(2, kind)).state_tokens for kind in (1, 2, 3)]
    assert kept == [2 * SIZE] * 3
    # Of its own it has the first ones, which others are likelier to share, and the last one.
    assert node.match(text(100, 9)).state_tokens == 100 * SIZE
    assert node.match(text(100, 9), max_tokens=2 * SIZE).state_tokens == 2 * SIZE


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_one_chat_of_many_turns_does_not_drive_out_the_checkpoints_of_others(eviction: str) -> None:
    node = FakeNode(num_blocks=600, num_slots=16, eviction=eviction)
    for kind in (1, 2, 3):
        node.serve(text(4, kind))
    chat = text(4, 9)
    for turn in range(30):
        node.serve(chat, answer=[turn] * 20)
        chat += [turn] * 20
        assert node.match(chat).state_tokens == (len(chat) - 1) // SIZE * SIZE
        chat += text(2, 100 + turn)
    assert [node.match(text(4, kind)).state_tokens for kind in (1, 2, 3)] == [3 * SIZE] * 3
    assert node.match(chat, max_tokens=4 * SIZE).state_tokens == 3 * SIZE


def test_a_prefix_used_twice_outlives_a_later_one_if_reuse_counts() -> None:
    kept = {}
    for eviction in ("flop_aware", "reuse_aware"):
        node = FakeNode(policy="every", num_blocks=6, eviction=eviction)
        for kind in (1, 1, 2):
            node.serve(text(2, kind))
        take_blocks(node, 2)
        kept[eviction] = [attention(node, text(2, kind)) for kind in (1, 2)]
    assert kept == {"flop_aware": [0, 2], "reuse_aware": [2, 0]}
