"""The cluster index follows the nodes' updates, and finds a prompt as the nodes do."""

import random
from collections.abc import Sequence

import pytest

from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import PrefixHit
from headrace.cache.journal import Journal, Reader
from headrace.cache.types import PrefixKey
from headrace.wire.cache_updates import CacheChange, CacheChanges, CacheSnapshotPart
from node_runtime.cache_feed import CacheFeed
from router.cluster.cluster_index import ClusterIndex, NodeIndex
from router.errors import MissedUpdates
from tests.support.cache.cache_node import FakeNode

KEYS = prefix_keys(range(64), 16)  # four blocks
EMPTY = CacheSnapshotPart(7, 0, (), (), True)


def followed(*updates: CacheSnapshotPart | CacheChanges) -> NodeIndex:
    index = NodeIndex(7, block_size=16)
    for update in updates:
        index.apply(update)
    return index


def changes(first_sequence: int, *kinds_and_keys: tuple[CacheChange, PrefixKey]) -> CacheChanges:
    return CacheChanges(7, first_sequence, kinds_and_keys)


def test_hits_per_group_as_a_node_would_have_them() -> None:
    index = followed(CacheSnapshotPart(7, 9, tuple(KEYS[:3]), (KEYS[1],), True))
    assert index.match(KEYS, max_tokens=64) == PrefixHit(48, 32, 32)
    assert index.match(KEYS, max_tokens=47) == PrefixHit(32, 32, 32)
    assert index.match(KEYS, max_tokens=31) == PrefixHit(16, 0, 0)
    assert index.match(KEYS[:1], max_tokens=64) == PrefixHit(16, 0, 0)
    assert index.match(prefix_keys(range(1, 65), 16), max_tokens=64) == PrefixHit(0, 0, 0)
    assert index.match([], max_tokens=64) == PrefixHit(0, 0, 0)
    assert index.match(prefix_keys(range(64), 16, b"another tenant"), max_tokens=64) == PrefixHit(0, 0, 0)


def test_changes_follow_on_the_snapshot() -> None:
    index = followed(EMPTY, changes(1, (CacheChange.BLOCK_STORED, KEYS[0]), (CacheChange.CHECKPOINT_STORED, KEYS[0])))
    assert index.match(KEYS, max_tokens=64) == PrefixHit(16, 16, 16)
    assert (index.sequence, index.num_blocks, index.num_checkpoints) == (2, 1, 1)
    index.apply(changes(3, (CacheChange.CHECKPOINT_EVICTED, KEYS[0])))
    assert index.match(KEYS, max_tokens=64) == PrefixHit(16, 0, 0)
    index.apply(changes(4, (CacheChange.BLOCK_EVICTED, KEYS[0])))
    assert (index.sequence, index.num_blocks, index.num_checkpoints) == (4, 0, 0)


@pytest.mark.parametrize(
    "update",
    [
        changes(2, (CacheChange.BLOCK_STORED, KEYS[0])),  # change 1 is missing
        changes(0, (CacheChange.BLOCK_STORED, KEYS[0])),
        CacheChanges(8, 1, ((CacheChange.BLOCK_STORED, KEYS[0]),)),  # another incarnation
        CacheSnapshotPart(8, 1, (KEYS[0],), (), True),
    ],
)
def test_an_update_after_a_gap_is_refused(update: CacheSnapshotPart | CacheChanges) -> None:
    index = followed(EMPTY)
    with pytest.raises(MissedUpdates):
        index.apply(update)
    assert (index.sequence, index.num_blocks) == (0, 0)


def test_changes_before_a_snapshot_are_refused_also_after_a_lost_call() -> None:
    change = changes(1, (CacheChange.BLOCK_STORED, KEYS[0]))
    with pytest.raises(MissedUpdates):
        followed(change)
    index = followed(EMPTY)
    index.lost()
    with pytest.raises(MissedUpdates):
        index.apply(change)


def test_a_snapshot_replaces_all_at_its_last_part_and_not_before() -> None:
    index = followed(CacheSnapshotPart(7, 9, (KEYS[0], KEYS[1]), (KEYS[1],), True))
    index.apply(CacheSnapshotPart(7, 50, (KEYS[0],), (), False))
    assert (index.sequence, index.match(KEYS, max_tokens=64)) == (9, PrefixHit(32, 32, 32))
    index.lost()  # a part of a broken call must not count with those of the next one
    index.apply(CacheSnapshotPart(7, 60, (), (), True))
    assert (index.sequence, index.match(KEYS, max_tokens=64)) == (60, PrefixHit(0, 0, 0))


def test_the_first_snapshot_counts_when_it_is_complete_even_if_its_call_breaks() -> None:
    index = ClusterIndex()
    node = index.add(("d0", 7), 16)
    node.apply(CacheSnapshotPart(7, 9, (KEYS[0], KEYS[1]), (), False))
    assert index.match({16: KEYS}, max_tokens=64) == {}
    node.lost()
    node.apply(CacheSnapshotPart(7, 10, (KEYS[0],), (), True))
    assert index.match({16: KEYS}, max_tokens=64) == {("d0", 7): PrefixHit(16, 0, 0)}
    assert (node.num_blocks, node.num_checkpoints) == (1, 0)


def test_what_was_known_stays_a_hint_while_a_node_is_not_followed() -> None:
    index = followed(CacheSnapshotPart(7, 9, (KEYS[0],), (), True))
    index.lost()
    assert not index.is_followed
    assert index.match(KEYS, max_tokens=64) == PrefixHit(16, 0, 0)


def test_nodes_are_kept_apart() -> None:
    index = ClusterIndex()
    for name, blocks in (("d0", KEYS[:1]), ("d1", KEYS[:2])):
        index.add((name, 7), 16).apply(CacheSnapshotPart(7, 1, tuple(blocks), (), True))
    found = index.match({16: KEYS}, max_tokens=64)
    assert found == {("d0", 7): PrefixHit(16, 0, 0), ("d1", 7): PrefixHit(32, 0, 0)}
    index.remove(("d0", 7))
    assert list(index.match({16: KEYS}, max_tokens=64)) == [("d1", 7)]


def stored(index: ClusterIndex, name: str, keys: Sequence[PrefixKey], checkpoints: Sequence[PrefixKey] = ()) -> None:
    known = index.get((name, 7)) or index.add((name, 7), 16)
    known.apply(CacheSnapshotPart(7, 1, tuple(keys), tuple(checkpoints), True))


@pytest.mark.parametrize("seed", range(5))
def test_many_nodes_are_matched_in_one_go_as_each_alone(seed: int) -> None:
    rng = random.Random(seed)
    keys = prefix_keys(range(16 * 200), 16)
    index = ClusterIndex()
    expected = {}
    for number in range(70):
        depth = rng.choice([0, 1, 7, 64, 65, 199, 200, rng.randint(0, 200)])
        checkpoints = [key for key in keys[: rng.randint(0, 200)] if rng.random() < 0.03]
        stored(index, f"n{number}", keys[:depth], checkpoints)
        state = next((i for i in range(depth, 0, -1) if keys[i - 1] in checkpoints), 0)
        if depth:
            expected[f"n{number}", 7] = PrefixHit(16 * depth, 16 * state, 16 * state)
    assert index.match({16: keys}, max_tokens=16 * 200) == expected


def test_a_node_that_is_gone_leaves_nothing_behind() -> None:
    index = ClusterIndex()
    shared, own = prefix_keys(range(16 * 3000), 16), prefix_keys(range(7, 16 * 3000), 16)
    stored(index, "d0", shared, shared[::9])
    stored(index, "d1", [*shared, *own], own[::9])
    index.remove(("d1", 7))
    assert set(index.match({16: shared}, max_tokens=1 << 20)) == {("d0", 7)}
    assert index.match({16: own}, max_tokens=1 << 20) == {}
    for _ in range(5):  # its bit may be given to others once its keys are swept
        stored(index, "d2", shared[:1])
        assert index.match({16: own}, max_tokens=1 << 20) == {}
        for _ in range(10):
            node = index.get(("d2", 7))
            assert node is not None
            node.apply(changes(2))
    assert len(index._table.blocks) == len(shared)
    assert len(index._table.checkpoints) == len(shared[::9])
    assert index._table._num_bits <= 6, "swept bits are given to others"


@pytest.mark.parametrize("seed", range(10))
def test_it_finds_what_the_node_finds_after_any_history(seed: int) -> None:
    rng = random.Random(seed)
    journal = Journal(max_events=32)
    node = FakeNode(num_blocks=16, num_slots=6, block_size=4, on_events=journal.record)
    feed = CacheFeed(None, journal, node.cache, incarnation=7, max_keys=3)  # type: ignore[arg-type]
    reader, index = Reader(lambda: None), NodeIndex(7, block_size=4)
    for _ in range(80):
        tokens = [token for _ in range(rng.randint(1, 5)) for token in [rng.randrange(2)] * 4] + [9]
        node.serve(tokens, answer=[7] * rng.randint(0, 6), hints=(rng.randint(0, 20),))
        if rng.random() < 0.5:
            continue
        for update in feed._messages(journal.read(reader, node.cache.contents)):
            index.apply(update)
        assert index.sequence == journal.sequence
        assert index.match(prefix_keys(tokens, 4), max_tokens=len(tokens)) == node.match(tokens)
    assert node.cache.stats().totals.block_evictions > 0


def test_checkpoints_that_end_no_block_of_the_fetching_node_do_not_count() -> None:
    index = followed(CacheSnapshotPart(7, 9, tuple(KEYS), (KEYS[0], KEYS[1], KEYS[2]), True))
    assert index.match(KEYS, max_tokens=64, receiver_block_size=16) == PrefixHit(64, 48, 48)
    assert index.match(KEYS, max_tokens=64, receiver_block_size=32) == PrefixHit(64, 32, 32)
    assert index.match(KEYS, max_tokens=64, receiver_block_size=8) == PrefixHit(64, 48, 48)
    assert index.match(KEYS, max_tokens=64, receiver_block_size=24) == PrefixHit(64, 48, 48)
    assert index.match(KEYS, max_tokens=64, receiver_block_size=64) == PrefixHit(64, 0, 0)


def test_nodes_of_different_block_sizes_are_matched_each_by_its_own_keys() -> None:
    index = ClusterIndex()
    keys = {size: prefix_keys(range(64), size) for size in (16, 32)}
    for name, size in (("d0", 16), ("d1", 32)):
        index.add((name, 7), size).apply(CacheSnapshotPart(7, 1, tuple(keys[size][:2]), (keys[size][1],), True))
    assert index.block_sizes == {16, 32}
    found = index.match(keys, max_tokens=64)
    assert found == {("d0", 7): PrefixHit(32, 32, 32), ("d1", 7): PrefixHit(64, 64, 64)}
    # A node that came while the prompt was hashed is not asked yet.
    assert set(index.match({16: keys[16]}, max_tokens=64)) == {("d0", 7)}
