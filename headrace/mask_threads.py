"""Masks of grammars, computed in threads, each within a limit of processor time. No torch.

Nothing within llguidance bounds the time of one mask: a grammar of 2 KiB (400 alternatives `s s` of a rule `s`) took
it 36 s at a vocabulary of 4,096, with its own limits on items and lexer states in force. A thread cannot be ended, so
one that takes too long is left behind, at the lowest priority, and the others go on with the rest.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

LOOK_S = 0.02
"""How often a thread's time is looked at while its masks are awaited."""
LOWEST_PRIORITY = 19
FEW = 4
"""Masks for which another thread is not worth its waking."""


class Matcher(Protocol):
    """A grammar that knows what may come next, as `llguidance.LLMatcher`."""

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_length: int, /) -> None: ...


class MaskThreads:
    """Up to `most` threads at a time, started when they are needed, and those that were left behind.

    limit_s   processor time for one mask
    """

    def __init__(self, most: int, limit_s: float) -> None:
        self._most = most
        self._limit_s = limit_s
        self._threads: list[_MaskThread] = []
        self._left_behind: list[_MaskThread] = []

    @property
    def num_left_behind(self) -> int:
        """Threads that still compute a mask which nobody awaits any more."""
        return sum(thread.is_alive() for thread in self._left_behind)

    def fill(
        self, matchers: Sequence[Matcher], masks: NDArray[np.int32], grammars: Sequence[Hashable]
    ) -> list[float | None]:
        """Writes each matcher's mask to its row, and returns the processor seconds of each; None: it took too long or
        broke, its row is as before, and the matcher must not be touched again.

        masks      [len(matchers), W]: rows without gaps
        grammars   names of the matchers' grammars: where one takes too long, no other matcher of it is tried
        """
        seconds: list[float | None] = [None] * len(matchers)
        given_up = set()
        width = min(self._most, -(-len(matchers) // FEW))
        parts = [list(range(first, len(matchers), width)) for first in range(width)]
        while parts:
            while len(self._threads) < len(parts):
                self._threads.append(_MaskThread())
            begun = [
                (thread, self._begin(thread, part, matchers, masks))
                for thread, part in zip(self._threads, parts, strict=False)
            ]
            parts = []
            for thread, work in begun:
                is_done = self._await(thread, work)
                num_done = len(work.seconds)
                whole = [number for number, taken_s in enumerate(work.seconds) if taken_s is not None]
                masks[[work.indices[number] for number in whole]] = work.masks[whole]
                for index, taken_s in zip(work.indices, work.seconds, strict=False):
                    seconds[index] = taken_s
                if not is_done:
                    self._leave(thread)
                    given_up.add(grammars[work.indices[num_done]])
                    parts.append(work.indices[num_done + 1 :])
            parts = [left for part in parts if (left := [i for i in part if grammars[i] not in given_up])]
        return seconds

    def _begin(
        self, thread: _MaskThread, part: list[int], matchers: Sequence[Matcher], masks: NDArray[np.int32]
    ) -> _Work:
        # Its own memory: a thread that is left behind writes when the caller's is gone.
        work = _Work(part, [matchers[index] for index in part], np.zeros((len(part), masks.shape[1]), np.int32))
        thread.queue.put(work)
        return work

    def _await(self, thread: _MaskThread, work: _Work) -> bool:
        """False if the thread has spent too much time on one mask."""
        while not work.done.wait(LOOK_S):
            with work.lock:
                if work.began_s is not None and thread.spent_s() - work.began_s > self._limit_s:
                    work.is_given_up = True
                    return False
        return True

    def _leave(self, thread: _MaskThread) -> None:
        self._threads.remove(thread)
        self._left_behind = [*(each for each in self._left_behind if each.is_alive()), thread]
        thread.queue.put(None)
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, LOWEST_PRIORITY)


@dataclass
class _Work:
    """Masks for one thread. `seconds` grows with those that are done; `began_s` is that of the one under way, by the
    thread's own clock. Under `lock` a mask is either done or given up."""

    indices: list[int]
    matchers: list[Matcher]
    masks: NDArray[np.int32]

    def __post_init__(self) -> None:
        self.seconds: list[float | None] = []
        self.began_s: float | None = None
        self.is_given_up = False
        self.lock = Lock()
        self.done = Event()


class _MaskThread(Thread):
    def __init__(self) -> None:
        super().__init__(name="masks", daemon=True)
        self.queue: SimpleQueue[_Work | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (work := self.queue.get()) is not None:
            first, num_bytes = work.masks.ctypes.data, work.masks.shape[1] * work.masks.itemsize
            began_s = work.began_s = time.thread_time()
            for number, matcher in enumerate(work.matchers):
                is_broken = False
                try:
                    matcher.unsafe_compute_mask_ptr(first + number * num_bytes, num_bytes)
                except ValueError:
                    pass  # its own error says the same
                except BaseException:  # a panic of llguidance is no Exception; without this thread all would wait
                    log.exception("a grammar's mask failed")
                    is_broken = True
                now_s = time.thread_time()
                with work.lock:
                    if work.is_given_up:
                        return
                    work.seconds.append(None if is_broken else now_s - began_s)
                    work.began_s = began_s = now_s
            work.done.set()

    def spent_s(self) -> float:
        """Processor time of this thread so far."""
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))
