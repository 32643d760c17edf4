"""A simulated engine's turns: when orders are obeyed, and when the next stride of steps is made and begins.

With costs of a host (`HostCosts.launches_ahead`) a turn comes with the last step of the stride under way, and what it
makes begins when device and host are done. Without them a turn comes at that stride's end, and takes no time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from benchmarks.router.events import Events
from benchmarks.router.host import HOST_SHARE, LEAD, HostCosts
from benchmarks.router.work import Stride, Work


class Steps(Protocol):
    """The contents of strides: the node's part.

    has_news   True if something waits for the next stride that would be made
    """

    @property
    def has_news(self) -> bool: ...

    def compose(self) -> Stride | None:
        """The next stride; None: there is nothing to do."""
        ...

    def advance(self, stride: Stride) -> None:
        """Counts what the stride under way computes, so that the next one can be made."""
        ...

    def settle(self, stride: Stride) -> None:
        """Takes the tokens of a stride that has ended."""
        ...

    def only_prompts_follow(self, stride: Stride) -> bool:
        """True if neither this stride nor the next one, as things stand, has answers."""
        ...


class Turns:
    """One engine's."""

    def __init__(self, events: Events, host: HostCosts, steps: Steps) -> None:
        self._events = events
        self._host = host
        self._steps = steps
        self._orders: deque[tuple[Callable[[Work], None], Work]] = deque()
        self._num_taken = 0  # requests taken in, for which the next turn pays
        self._running: Stride | None = None
        self._made: Stride | None = None  # launched, and not begun yet
        self._is_open = False  # the next step is made later
        self._is_busy = False

    def order(self, call: Callable[[Work], None], work: Work) -> None:
        """Calls `call(work)` in the next turn; at once if nothing is launched ahead, or while the next step is open."""
        if not self._host.launches_ahead:
            call(work)
            return
        self._orders.append((call, work))
        if self._is_open:
            self._obey_while_open()
        else:
            self.changed()

    def took_in(self) -> None:
        """A request was admitted."""
        self._num_taken += 1

    def changed(self) -> None:
        """Has the next turn come as soon as it can."""
        if self._is_busy or self._made is not None:
            return
        if self._running is None:
            self._turn(None)
        elif self._running.num_steps > 1:
            num_steps = self._running.steps_by(self._events.now_s) + self._host.launches_ahead
            if num_steps < self._running.num_steps:
                self._running = self._running.cut(num_steps)
                self._await_turn(self._running)

    @property
    def launched_s(self) -> float:
        """When the device has done what was launched, as far as orders must wait for it."""
        running = self._running if self._host.launches_ahead else None
        return self._events.now_s if running is None else running.end_s

    def start_s(self, num_answers: int, *, has_prompts: bool) -> float:
        """When a stride that is made now begins, once device and host are ready for it."""
        turn_s = self._host.turn_s(num_answers, self._num_taken, has_prompts=has_prompts)
        ready_s = self._events.now_s + turn_s
        return ready_s if self._running is None else max(self._running.end_s, ready_s)

    def _turn(self, running: Stride | None) -> None:
        """Makes the stride behind `running`; does nothing if that was cut, or it has been made."""
        if running is not self._running or self._made is not None:
            return
        self._is_busy, self._is_open = True, False
        share_s = math.inf
        if running is not None and running.end_s <= self._events.now_s:
            self._running = None
            self._steps.settle(running)
        elif running is not None:
            self._steps.advance(running)
            share_s = HOST_SHARE * (running.end_s - running.last_s)
        while self._orders and self._num_taken * self._host.request_s < share_s:
            self._obey_next()
        made = self._steps.compose()
        self._num_taken = 0
        self._is_busy = False
        if made is not None:
            self._made = made
            if made.start_s > self._events.now_s:
                self._events.at(made.start_s, self._begin, made)
            else:
                self._begin(made)
        elif self._running is not None:
            self._events.at(self._running.end_s, self._turn, running)

    def _begin(self, stride: Stride) -> None:
        if self._running is not None:
            self._is_busy = True
            self._steps.settle(self._running)
            self._is_busy = False
        if stride.num_steps > 1 and (self._orders or self._steps.has_news):
            stride = stride.cut(1)
        self._running, self._made = stride, None
        self._await_turn(stride)

    def _await_turn(self, stride: Stride) -> None:
        now_s, host = self._events.now_s, self._host
        turn_s = stride.last_s if host.launches_ahead else stride.end_s
        if host.leaves_open and self._steps.only_prompts_follow(stride):
            turn_s = stride.end_s - LEAD * host.turn_s(0, 0, has_prompts=True)
            self._is_open = turn_s > now_s
        self._events.at(max(turn_s, now_s), self._turn, stride)
        if self._is_open:
            self._obey_while_open()

    def _obey_while_open(self) -> None:
        self._is_busy = True
        while self._orders:
            self._obey_next()
        self._num_taken = 0  # the device did not wait for these
        self._is_busy = False
        if self._running is not None and not self._steps.only_prompts_follow(self._running):
            self._turn(self._running)

    def _obey_next(self) -> None:
        call, work = self._orders.popleft()
        call(work)
