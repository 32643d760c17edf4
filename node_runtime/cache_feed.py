"""Streams the contents of a node's cache, and every later change, to subscribers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from functools import partial

from headrace.cache.events import BlockEvicted, BlockStored, CacheEvent, CheckpointEvicted, CheckpointStored
from headrace.cache.journal import Batch, Journal, Reader, Snapshot
from headrace.cache.prefix_cache import PrefixCache
from headrace.engine.loop import EngineLoop, EngineLost
from headrace.wire.cache_updates import CacheChange, CacheChanges, CacheSnapshotPart, CacheUpdate

MAX_KEYS_PER_MESSAGE = 1 << 14  # half a mebibyte: a snapshot of a million blocks must not block the event loop

_KINDS: dict[type[CacheEvent], CacheChange] = {
    BlockStored: CacheChange.BLOCK_STORED,
    BlockEvicted: CacheChange.BLOCK_EVICTED,
    CheckpointStored: CacheChange.CHECKPOINT_STORED,
    CheckpointEvicted: CacheChange.CHECKPOINT_EVICTED,
}


class CacheFeed:
    """Carries a cache's journal from the engine's thread to subscribers in the event loop.

    A subscriber that has sent its updates asks for more; the engine then wakes it once, after the next step with a
    change. `max_keys` limits the keys of one message.
    """

    def __init__(
        self,
        loop: EngineLoop,
        journal: Journal,
        cache: PrefixCache,
        incarnation: int,
        max_keys: int = MAX_KEYS_PER_MESSAGE,
    ) -> None:
        self._loop = loop
        self._journal = journal
        self._cache = cache
        self._incarnation = incarnation
        self._max_keys = max_keys
        self._awaiting: set[asyncio.Event] = set()
        self._closed = False

    async def updates(self) -> AsyncGenerator[CacheUpdate, None]:
        """Yields a snapshot, then every change; ends when the node stops."""
        woken = asyncio.Event()
        reader = Reader(partial(self._loop.deliver, woken.set))
        self._awaiting.add(woken)
        try:
            while not self._closed:
                woken.clear()
                news = await self._loop.call(lambda: self._journal.read(reader, self._cache.contents))
                for update in self._messages(news):
                    yield update
                if not self._closed:
                    await woken.wait()
        except EngineLost:
            return
        finally:
            self._awaiting.discard(woken)
            self._loop.post(lambda: self._journal.leave(reader))

    def close(self) -> None:
        """Ends all streams. One that starts later ends at once."""
        self._closed = True
        for woken in self._awaiting:
            woken.set()

    def _messages(self, news: Snapshot | Batch | None) -> Iterator[CacheUpdate]:
        match news:
            case Snapshot():
                return self._parts(news)
            case Batch():
                return self._changes(news)
            case None:
                return iter(())

    def _parts(self, snapshot: Snapshot) -> Iterator[CacheSnapshotPart]:
        blocks, checkpoints = snapshot.contents.blocks, snapshot.contents.checkpoints
        longest = max(len(blocks), len(checkpoints))
        for start in range(0, max(longest, 1), self._max_keys):
            end = start + self._max_keys
            yield CacheSnapshotPart(
                incarnation=self._incarnation,
                sequence=snapshot.sequence,
                blocks=tuple(blocks[start:end]),
                checkpoints=tuple(checkpoints[start:end]),
                is_last=end >= longest,
            )

    def _changes(self, batch: Batch) -> Iterator[CacheChanges]:
        for start in range(0, len(batch.events), self._max_keys):
            events = batch.events[start : start + self._max_keys]
            changes = tuple((_KINDS[type(event)], event.key) for event in events)
            yield CacheChanges(self._incarnation, batch.first_sequence + start, changes)
