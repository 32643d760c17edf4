"""The event stream of one cache: numbered, bounded, and consistent with a snapshot for late readers.

One journal, any number of readers. A reader gets a snapshot that holds everything up to some sequence number,
then every later event exactly once and in order. One that falls behind by more than the journal keeps gets a
new snapshot instead of the events it missed, so a slow reader never makes the node's memory grow.

Not thread-safe: it belongs to the thread that calls the cache.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from headrace.cache.events import CacheContents, CacheEvent

DEFAULT_MAX_EVENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is findable after the event number `sequence`; it replaces the reader's earlier contents."""

    sequence: int
    contents: CacheContents


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive events, the first of them number `first_sequence`."""

    first_sequence: int
    events: tuple[CacheEvent, ...]


class Reader:
    """One subscriber's position in a journal.

    `on_news` is called when there is something to read, at most once after each read.
    """

    def __init__(self, on_news: Callable[[], None]) -> None:
        self.on_news = on_news
        self.sequence: int | None = None


class Journal:
    """Numbers the events of a cache from 1 on, and keeps the last `max_events` while there are readers.

    `record` is the cache's `on_events`; without readers it only counts.
    """

    def __init__(self, max_events: int = DEFAULT_MAX_EVENTS) -> None:
        if max_events < 1:
            raise ValueError(f"max_events {max_events}: must be at least 1")
        self.sequence = 0
        self._recent: deque[CacheEvent] = deque(maxlen=max_events)
        self._readers: set[Reader] = set()
        self._up_to_date: set[Reader] = set()

    def record(self, events: Sequence[CacheEvent]) -> None:
        self.sequence += len(events)
        if not self._readers:
            return
        self._recent.extend(events)
        while self._up_to_date:
            self._up_to_date.pop().on_news()

    def read(self, reader: Reader, contents: Callable[[], CacheContents]) -> Snapshot | Batch | None:
        """Everything `reader` has not seen yet, None if that is nothing. A new reader joins by its first read.

        `contents` is the cache's; it is called only for a snapshot.
        """
        seen, reader.sequence = reader.sequence, self.sequence
        self._readers.add(reader)
        self._up_to_date.add(reader)
        if seen is None or self.sequence - seen > len(self._recent):
            return Snapshot(self.sequence, contents())
        if seen == self.sequence:
            return None
        latest_first = islice(reversed(self._recent), self.sequence - seen)  # from the other end it walks over all
        return Batch(seen + 1, tuple(latest_first)[::-1])

    def leave(self, reader: Reader) -> None:
        """Forgets a reader; the same whether it has joined or not."""
        self._readers.discard(reader)
        self._up_to_date.discard(reader)
        if not self._readers:
            self._recent.clear()
