"""Work on grammars, done in threads, each piece within a limit of processor time. No torch.

Nothing within llguidance bounds the time of one mask: a grammar of 2 KiB (400 alternatives `s s` of a rule `s`) took
it 36 s at a vocabulary of 4,096, with its own limits on items and lexer states in force. A thread cannot be ended, so
one that takes too long is left behind, at the lowest priority, and the others go on with the rest.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.02
"""How often a thread's time is looked at while its work is awaited."""
LOWEST_PRIORITY = 19
QUICK_S = 0.001
"""Work that took no longer by the clock is counted as that: on a virtual machine, to ask for a thread's processor time
may take 2 us, where most masks take 10 to 20."""
FEW = 4
"""Pieces of work for which another thread is not worth its waking."""


class GrammarThreads:
    """Up to `most` threads at a time, started when they are needed, and those that were left behind.

    limit_s   processor time for one piece of work, after the first look at it
    """

    def __init__(self, most: int, limit_s: float) -> None:
        self._most = most
        self._limit_s = limit_s
        self._threads: list[_GrammarThread] = []
        self._left_behind: list[_GrammarThread] = []

    @property
    def num_left_behind(self) -> int:
        """Threads that still do a piece of work which nobody awaits any more."""
        return sum(thread.is_alive() for thread in self._left_behind)

    def run(
        self, works: Sequence[Callable[[], T]], grammars: Sequence[Hashable], memory: object = None
    ) -> list[tuple[T, float] | None]:
        """The value of each piece of work, and its processor seconds, or a little more; None: it took too long or
        raised, or was not begun, and its grammar's matcher must not be touched again.

        grammars   the name of each one's grammar: where one takes too long, no other of it is begun
        memory     what they write to: kept for as long as a thread that was left behind may still write
        """
        if not works:
            return []
        batch = _Batch(works, grammars, memory)
        width = min(self._most, -(-len(works) // FEW))
        while len(self._threads) < width:
            self._threads.append(_GrammarThread())
        busy = self._threads[:width]
        for thread in busy:
            thread.batches.put(batch)
        while not batch.is_over.wait(LOOK_S):
            for thread in [each for each in busy if each.is_given_up(batch, self._limit_s)]:
                busy.remove(thread)
                self._leave(thread)
                another = _GrammarThread()
                another.batches.put(batch)
                busy.append(another)
                self._threads.append(another)
        return batch.results

    def _leave(self, thread: _GrammarThread) -> None:
        self._threads.remove(thread)
        self._left_behind = [*(each for each in self._left_behind if each.is_alive()), thread]
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, LOWEST_PRIORITY)


class _Batch(Generic[T]):
    """Work that threads take piece by piece. Under `lock` each piece ends once: by its thread, or given up."""

    def __init__(self, works: Sequence[Callable[[], T]], grammars: Sequence[Hashable], memory: object) -> None:
        self.works, self.grammars, self.memory = works, grammars, memory
        self.results: list[tuple[T, float] | None] = [None] * len(works)
        self.indices = iter(range(len(works)))  # `next` of it is atomic
        self.given_up: set[Hashable] = set()
        self.lock = Lock()
        self.is_over = Event()
        self._num_left = len(works)

    def end(self, index: int, result: tuple[T, float] | None) -> None:
        self.results[index] = result
        self._num_left -= 1
        if not self._num_left:
            self.is_over.set()


class _GrammarThread(Thread):
    def __init__(self) -> None:
        super().__init__(name="grammars", daemon=True)
        self.batches: SimpleQueue[_Batch[Any]] = SimpleQueue()
        self._is_left = False
        self._at: int | None = None  # the piece under way
        self._seen_s: float | None = None  # this thread's time when that piece was first looked at
        self.start()

    def run(self) -> None:
        while self._work(self.batches.get()):
            pass  # without a name for the batch: its memory is not this thread's to keep

    def _work(self, batch: _Batch[Any]) -> bool:
        """False if this thread was left behind."""
        counted_s = time.thread_time()
        for index in batch.indices:
            result = None
            if batch.grammars[index] not in batch.given_up:
                self._at = index
                began_s = time.perf_counter()
                try:
                    value = batch.works[index]()
                    seconds = time.perf_counter() - began_s
                    if seconds > QUICK_S:  # others may have had the processor
                        now_s = time.thread_time()
                        seconds, counted_s = min(seconds, now_s - counted_s), now_s
                    result = value, seconds
                except BaseException:  # a panic of llguidance is no Exception; without this thread all would wait
                    log.exception("work on a grammar failed")
            with batch.lock:
                if self._is_left:
                    return False
                self._at = self._seen_s = None
                batch.end(index, result)
        return True

    def is_given_up(self, batch: _Batch[Any], limit_s: float) -> bool:
        """True if what it does has taken too long: then it is not awaited any more."""
        assert self.ident is not None
        with batch.lock:
            if self._at is None:
                return False
            spent_s = time.clock_gettime(time.pthread_getcpuclockid(self.ident))
            if self._seen_s is None:
                self._seen_s = spent_s
            if spent_s - self._seen_s <= limit_s:
                return False
            self._is_left = True
            batch.given_up.add(batch.grammars[self._at])
            batch.end(self._at, None)
            return True
