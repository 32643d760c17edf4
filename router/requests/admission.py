"""Admission control: bounds on running and on queued requests, shared fairly by clients."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from headrace.request import Request
from router.errors import ApiError, objectives_missed, too_many_requests
from router.fair_line import FairLine
from router.requests.wait_estimate import WaitEstimate

MARGIN = 1.2  # on an estimated wait: those who are admitted should not run out of time
ANSWER_TOKENS = 256
"""Answers count as so many tokens at the most, until they end: `max_tokens` is often all that the model has left."""
ANSWER_WEIGHT = 2
"""A token of an answer counts as so many of a prompt that is computed (Sheng et al. 2024)."""
FIRST_SHARE = 1 / 4
"""Places beyond `max_concurrent`, as a share of it, for clients that have none."""


class _Room(NamedTuple):
    """The places that there are at present; `free` is negative while some run beyond `num_places`."""

    num_places: int
    free: int

    def for_one(self, num_held: int) -> bool:
        """True if there is a place for the next request of a client that holds so many."""
        return self.free > (0 if num_held else -int(FIRST_SHARE * self.num_places))


class Admission:
    """`max_concurrent` requests run, `max_queue` wait, more are refused.

    A client that has no place gets one beyond `max_concurrent`, as long as fewer than a quarter more run: its first
    request does not wait for other clients' further ones, however long these take. A client alone gets
    `max_concurrent`.

    The clients take turns, each with as much work as the others (`FairLine`): one that sends more waits longer itself.
    Work is tokens that are computed: a prompt counts whole until it is known how much of it was cached. In a full queue
    the request goes that would have its turn last, whether it has just come or waits already. A request that would wait
    longer than its time allows is refused at once, too.

    max_per_client  places that one client may have at a time; None: all of them
    timeout_s       a request's whole time, its wait included
    clock           yields seconds
    nodes_line_s    returns the seconds by which the prompts that the nodes have delay one of so many tokens
    room_within_gap  returns how many requests more than those that have their nodes keep the token gap; the others wait
    """

    def __init__(
        self,
        max_concurrent: int,
        max_queue: int,
        *,
        max_per_client: int | None = None,
        timeout_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        nodes_line_s: Callable[[int], float] = lambda num_tokens: 0.0,
        room_within_gap: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._max_concurrent = max_concurrent
        self._max_queue = max_queue
        self._max_per_client = max_per_client or max_concurrent
        self._timeout_s = timeout_s
        self._clock = clock
        self._nodes_line_s = nodes_line_s
        self._room_within_gap = room_within_gap
        self._estimate = WaitEstimate()
        self._waiting: FairLine[AdmissionPermit] = FairLine()
        self._running: set[AdmissionPermit] = set()
        self._places: Counter[str] = Counter()  # of each client that has any

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check_line(self, client: str, priority: int = 0) -> None:
        """Raises ApiError (429) if not even one more request of this client fits: asked before its body is read."""
        position = self._waiting.position(client, priority)
        if (
            not self._room().for_one(self._places[client])
            and self.waiting >= self._max_queue
            and position >= self.waiting
        ):
            raise self._full(1)
        self._check_time(client, 1, position)

    def acquire(
        self,
        client: str,
        requests: Sequence[Request],
        *,
        followers: Collection[int] = (),
        priority: int = 0,
        first_token_s: float | None = None,
        charge: Callable[[int], None] = lambda num_tokens: None,
    ) -> list[AdmissionPermit]:
        """One permit for each request of one client, all or none; raises ApiError (429) when the queue is full or the
        wait longer than `first_token_s`. `charge` gets the tokens that they have cost, as that becomes known.

        Every permit must be released: only that frees its place. Those with an index in `followers` keep their places
        in the queue, but are passed over until `may_run`.
        """
        position, num_tokens = self._waiting.position(client, priority), max(len(each.tokens) for each in requests)
        self._check_time(client, len(requests), position, num_tokens, first_token_s)
        permits = [
            AdmissionPermit(self, client, _cost(request, index in followers), index in followers, charge)
            for index, request in enumerate(requests)
        ]
        for permit in permits:
            self._waiting.join(client, permit, permit.cost, priority)
        room = self._room()
        at_once = max(room.free, int(room.for_one(self._places[client])))
        last = self._waiting.last(max(0, self.waiting - at_once - self._max_queue))
        if not set(last).isdisjoint(permits):
            for permit in reversed(permits):
                self._waiting.leave(permit)
            raise self._full(len(permits))
        for permit in last:
            self._waiting.leave(permit)
            permit.refuse(self._full(1))
        self.grant()
        return permits

    def _full(self, count: int) -> ApiError:
        return too_many_requests(
            f"{self.waiting} requests wait and {count} more of this client do not fit: max_queue is {self._max_queue}",
            code="queue_full",
            retry_after_s=self._wait_s(max(1, self.waiting + count - self._max_queue)),
        )

    def _check_time(
        self, client: str, count: int, before: int, num_tokens: int = 1, first_token_s: float | None = None
    ) -> None:
        """`before`: how many of the line would go before these `count` requests of at most `num_tokens` tokens."""
        room = self._room()
        position = before + count - max(room.free, 0)
        is_first = count == 1 and not self._places[client]
        if position <= 0 or (is_first and room.for_one(0)):
            return
        wait_s = self._wait_s(position, num_tokens)
        if first_token_s is not None and wait_s > first_token_s:
            raise objectives_missed(first_token_s, None, first_token_in_s=wait_s, relief_s=wait_s - first_token_s)
        usual_s = self._estimate.usual_s(client, self._running_s(client))
        needed_s = MARGIN * wait_s + usual_s
        if needed_s > self._timeout_s:
            raise too_many_requests(
                f"{self.waiting} requests wait: a place and an answer would take about {needed_s:.0f} s, and a request "
                f"has {self._timeout_s:g} s (request_timeout_s)",
                code="wait_too_long",
                retry_after_s=needed_s - self._timeout_s,
            )

    def _wait_s(self, position: int, num_tokens: int = 1) -> float:
        num_places, line_s = self._room().num_places, self._nodes_line_s(num_tokens)
        return self._estimate.wait_s(position, num_places, self._running_s(), line_s)

    def _running_s(self, client: str | None = None) -> list[float]:
        """For how long the running requests, or those of one client, have had their places."""
        now_s = self._clock()
        return [now_s - permit.granted_at_s for permit in self._running if client in (None, permit.client)]

    def _room(self) -> _Room:
        num_running = len(self._running)
        num_unplaced = sum(not permit.is_placed for permit in self._running)
        within_gap = max(1, num_running + self._room_within_gap() - num_unplaced)
        num_places = int(min(self._max_concurrent, within_gap))
        return _Room(num_places, num_places - num_running)

    def grant(self) -> None:
        """Gives the free places to those who wait. To be called, too, when nodes have reported what they have to do."""
        if not self._waiting:
            return
        room = self._room()
        while room.for_one(0) and (permit := self._waiting.take(partial(self._may_run, room))) is not None:
            room = _Room(room.num_places, room.free - 1)
            self._running.add(permit)
            self._places[permit.client] += 1
            permit.grant(self._clock())

    def _may_run(self, room: _Room, permit: AdmissionPermit) -> bool:
        num_held = self._places[permit.client]
        return not permit.held_back and num_held < self._max_per_client and room.for_one(num_held)

    def _leave(self, permit: AdmissionPermit) -> None:
        if permit in self._running:
            self._running.remove(permit)
            self._estimate.ended(permit.client, self._clock() - permit.granted_at_s)
            self._places[permit.client] -= 1
            self._places += Counter()  # drops the clients without places
        elif not permit.is_refused:
            self._waiting.leave(permit)
        self.grant()

    def _served(self, permit: AdmissionPermit, computed_tokens: int, answer_tokens: int) -> None:
        if permit in self._running:
            cost = _work(computed_tokens, answer_tokens)
            self._waiting.correct(permit.client, cost - permit.cost)
            permit.cost = cost
            permit.charge(computed_tokens + answer_tokens)


class AdmissionPermit:
    """The right of one request to run, once granted. `cost`: its work in tokens, as far as it is known."""

    def __init__(
        self, admission: Admission, client: str, cost: int, held_back: bool, charge: Callable[[int], None]
    ) -> None:
        self.client = client
        self.cost = cost
        self.held_back = held_back
        self.granted_at_s = 0.0
        self.is_placed = False
        self._admission = admission
        self._charge = charge
        self._num_charged = 0
        self._is_released = False
        self._decided = asyncio.Event()
        self._refusal: ApiError | None = None

    @property
    def is_granted(self) -> bool:
        return self._decided.is_set() and not self.is_refused

    @property
    def is_refused(self) -> bool:
        return self._refusal is not None

    def grant(self, now_s: float) -> None:
        self.granted_at_s = now_s
        self._decided.set()

    def refuse(self, error: ApiError) -> None:
        self._refusal = error
        self._decided.set()

    async def wait(self) -> None:
        """Waits for the grant; raises ApiError (429) if the request is pushed out of the queue instead."""
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    def may_run(self) -> None:
        """Ends its being held back."""
        self.held_back = False
        self._admission.grant()

    def placed(self) -> None:
        """Notes that the request has its nodes: their load says what it takes."""
        self.is_placed = True

    def served(self, *, computed_tokens: int, answer_tokens: int) -> None:
        """Counts what the request has cost, so far or in the end; for nothing once its place is free."""
        self._admission._served(self, computed_tokens, answer_tokens)

    def charge(self, num_tokens: int) -> None:
        """Charges its client for so many tokens, all together: for those that are new."""
        self._charge(num_tokens - self._num_charged)
        self._num_charged = num_tokens

    def release(self) -> None:
        """Frees the place, or leaves the queue; more than once does no harm."""
        if not self._is_released:
            self._is_released = True
            self._admission._leave(self)


def _cost(request: Request, is_follower: bool) -> int:
    """The work that a request asks for. A follower's prompt is computed for the first of its siblings."""
    num_prompt = 0 if is_follower else len(request.tokens)
    return _work(num_prompt, min(request.sampling.max_tokens, ANSWER_TOKENS))


def _work(computed_tokens: int, answer_tokens: int) -> int:
    return computed_tokens + ANSWER_WEIGHT * answer_tokens
