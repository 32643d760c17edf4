"""The event stream of a cache: what a reader knows always ends up as what the cache holds."""

import random

import pytest

from headrace.cache.events import BlockEvicted, BlockStored, CacheContents, CheckpointEvicted, CheckpointStored
from headrace.cache.hashing import prefix_keys
from headrace.cache.journal import Batch, Journal, Reader, Snapshot
from headrace.cache.types import PrefixKey
from tests.support.cache.cache_node import FakeNode


def block(number: int) -> BlockStored:
    return BlockStored(PrefixKey(bytes([number])), None)


def nothing() -> CacheContents:
    return CacheContents([], [])


class Subscriber:
    """Applies what it reads; raises on a gap or an event that does not fit what it knows."""

    def __init__(self, journal: Journal, node: FakeNode) -> None:
        self.journal, self.node = journal, node
        self.num_news = self.num_snapshots = 0
        self.sequence = -1
        self.blocks: set[PrefixKey] = set()
        self.checkpoints: set[PrefixKey] = set()
        self.reader = Reader(self.hear)

    def hear(self) -> None:
        self.num_news += 1

    def read(self) -> None:
        match self.journal.read(self.reader, self.node.cache.contents):
            case Snapshot(sequence, contents):
                self.num_snapshots += 1
                self.sequence = sequence
                self.blocks, self.checkpoints = set(contents.blocks), set(contents.checkpoints)
            case Batch(first_sequence, events):
                assert first_sequence == self.sequence + 1
                self.sequence += len(events)
                for event in events:
                    match event:
                        case BlockStored(key, parent):
                            assert parent is None or parent in self.blocks
                            self.blocks.add(key)
                        case BlockEvicted(key):
                            self.blocks.remove(key)
                        case CheckpointStored(key):
                            assert key in self.blocks
                            self.checkpoints.add(key)
                        case CheckpointEvicted(key):
                            self.checkpoints.remove(key)
        assert self.sequence == self.journal.sequence
        contents = self.node.cache.contents()
        assert (self.blocks, self.checkpoints) == (set(contents.blocks), set(contents.checkpoints))


def journaled_node(max_events: int = 1000) -> tuple[Journal, FakeNode]:
    journal = Journal(max_events)
    return journal, FakeNode(num_blocks=12, num_slots=6, block_size=4, on_events=journal.record)


def test_a_snapshot_then_every_later_event_once_and_in_order() -> None:
    journal, reader = Journal(), Reader(lambda: None)
    journal.record([block(1)])
    held = CacheContents([PrefixKey(b"\1")], [])
    assert journal.read(reader, lambda: held) == Snapshot(1, held)
    assert journal.read(reader, nothing) is None
    journal.record([block(2)])
    journal.record([BlockEvicted(PrefixKey(b"\2"))])
    assert journal.read(reader, nothing) == Batch(2, (block(2), BlockEvicted(PrefixKey(b"\2"))))
    journal.record([block(3)])
    assert journal.read(reader, nothing) == Batch(4, (block(3),))
    assert journal.read(reader, nothing) is None


def test_readers_at_different_places_do_not_disturb_each_other() -> None:
    journal = Journal()
    early, late = Reader(lambda: None), Reader(lambda: None)
    assert journal.read(early, nothing) == Snapshot(0, nothing())
    journal.record([block(1)])
    assert journal.read(late, nothing) == Snapshot(1, nothing())
    journal.record([block(2)])
    assert journal.read(early, nothing) == Batch(1, (block(1), block(2)))
    assert journal.read(late, nothing) == Batch(2, (block(2),))


@pytest.mark.parametrize(("num_events", "starts_over"), [(3, False), (4, True)])
def test_one_that_falls_behind_by_more_than_the_bound_starts_over(num_events: int, starts_over: bool) -> None:
    journal, reader = Journal(max_events=3), Reader(lambda: None)
    journal.read(reader, nothing)
    for number in range(num_events):
        journal.record([block(number)])
    assert isinstance(journal.read(reader, nothing), Snapshot) == starts_over
    journal.record([block(9)])
    assert journal.read(reader, nothing) == Batch(num_events + 1, (block(9),))


def test_one_wake_up_a_read_however_many_events() -> None:
    journal, node = journaled_node()
    subscriber = Subscriber(journal, node)
    node.serve(range(16))
    assert subscriber.num_news == 0  # nothing before it has joined
    for turn in range(1, 4):
        subscriber.read()
        node.serve(range(100 * turn, 100 * turn + 16))
        assert subscriber.num_news == turn


def test_without_readers_nothing_is_kept() -> None:
    journal, reader = Journal(), Reader(lambda: pytest.fail("it has left"))
    journal.read(reader, nothing)
    journal.leave(reader)
    journal.leave(reader)
    for number in range(5):
        journal.record([block(number)])
    assert journal.sequence == 5
    assert len(journal._recent) == 0


@pytest.mark.parametrize("seed", range(20))
def test_readers_of_any_speed_end_up_with_what_the_cache_holds(seed: int) -> None:
    rng = random.Random(seed)
    journal, node = journaled_node(max_events=rng.choice([1, 8, 64]))
    subscribers: list[Subscriber] = []
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(4)] * rng.randint(1, 4) + [9]
        node.serve(tokens, answer=[7] * rng.randint(0, 6), hints=(rng.randint(0, 12),))
        if rng.random() < 0.2:
            subscribers.append(Subscriber(journal, node))
        for subscriber in subscribers:
            if rng.random() < 0.4:
                subscriber.read()
    for subscriber in subscribers:
        subscriber.read()
    assert node.cache.stats().totals.block_evictions > 0
    assert node.cache.stats().totals.checkpoints_evicted > 0


def test_contents_lists_each_block_and_checkpoint_once() -> None:
    _, node = journaled_node()
    node.serve(range(17))
    contents, keys = node.cache.contents(), prefix_keys(range(16), 4)
    assert sorted(contents.blocks) == sorted(keys)
    assert contents.checkpoints == keys[-1:]
