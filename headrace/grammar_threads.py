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
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Lock, Thread

log = logging.getLogger(__name__)

LOOK_S = 0.02
"""How often a thread's time is looked at while its work is awaited."""
LOWEST_PRIORITY = 19
QUICK_S = 0.001
"""A group that took no longer by the clock is counted as that: on a virtual machine, to ask for a thread's processor
time may take 2 us, where most masks take 10 to 20."""
FEW = 4
"""Pieces of work for which another thread is not worth its waking."""


@dataclass(frozen=True)
class WorkGroup:
    """Pieces of work that one thread does in turn: they share what others would have to wait for. At least one.

    grammar   the name of their grammar
    """

    grammar: Hashable
    pieces: Sequence[Callable[[], object]]


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

    def run(self, groups: Sequence[WorkGroup], memory: object = None) -> list[float | None]:
        """The processor seconds of each group, or a little more; None: a piece of it took too long or raised, or it was
        not begun, and nothing that it works with must be touched again.

        Where a piece takes too long, no other group of its grammar is begun.

        memory   what they write to: kept for as long as a thread that was left behind may still write
        """
        if not groups:
            return []
        batch = _Batch(groups, memory)
        num_pieces = sum(len(group.pieces) for group in groups)
        width = min(self._most, len(groups), -(-num_pieces // FEW))
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


class _Batch:
    """Groups that threads take one by one. Under `lock` each ends once: by its thread, or given up."""

    def __init__(self, groups: Sequence[WorkGroup], memory: object) -> None:
        self.groups, self.memory = groups, memory
        self.results: list[float | None] = [None] * len(groups)
        self.indices = iter(range(len(groups)))  # `next` of it is atomic
        self.given_up: set[Hashable] = set()
        self.lock = Lock()
        self.is_over = Event()
        self._num_left = len(groups)

    def end(self, index: int, seconds: float | None) -> None:
        self.results[index] = seconds
        self._num_left -= 1
        if not self._num_left:
            self.is_over.set()


class _GrammarThread(Thread):
    def __init__(self) -> None:
        super().__init__(name="grammars", daemon=True)
        self.batches: SimpleQueue[_Batch] = SimpleQueue()
        self._is_left = False
        self._at: int | None = None  # the group under way
        self._num_begun = 0  # pieces, ever
        self._seen = (0, 0.0)  # the piece that was looked at last, by `_num_begun`, and this thread's time at first
        self.start()

    def run(self) -> None:
        while self._work(self.batches.get()):
            pass  # without a name for the batch: its memory is not this thread's to keep

    def _work(self, batch: _Batch) -> bool:
        """False if this thread was left behind."""
        counted_s = time.thread_time()
        for index in batch.indices:
            group, seconds = batch.groups[index], None
            if group.grammar not in batch.given_up:
                self._at = index
                began_s = time.perf_counter()
                try:
                    # A mask leaves others the GIL and takes it again: the less is done with it in between, the less
                    # threads wait for each other.
                    for piece in group.pieces:
                        self._num_begun += 1
                        piece()
                        if self._is_left:
                            return False
                    seconds = time.perf_counter() - began_s
                    if seconds > QUICK_S:  # others may have had the processor
                        now_s = time.thread_time()
                        seconds, counted_s = min(seconds, now_s - counted_s), now_s
                except BaseException:  # a panic of llguidance is no Exception; without this thread all would wait
                    log.exception("work on a grammar failed")
            with batch.lock:
                if self._is_left:
                    return False
                self._at = None
                batch.end(index, seconds)
        return True

    def is_given_up(self, batch: _Batch, limit_s: float) -> bool:
        """True if the piece that it does has taken too long: then its group is not awaited any more."""
        assert self.ident is not None
        with batch.lock:
            if self._at is None:
                return False
            spent_s = time.clock_gettime(time.pthread_getcpuclockid(self.ident))
            number, seen_s = self._seen
            if number != self._num_begun:
                self._seen = self._num_begun, spent_s
                return False
            if spent_s - seen_s <= limit_s:
                return False
            self._is_left = True
            batch.given_up.add(batch.groups[self._at].grammar)
            batch.end(self._at, None)
            return True
