"""The part of driving a session that both sides share: its instructions, its deadline, its end and who waits for it.

A session's tasks are never cancelled: a transport may still be reading or writing their buffers. They notice that the
session has ended and return by themselves; operations in flight of a failed session get GRACE_S.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from transfer.backend import Transport
from transfer.buffers import StagingBuffer
from transfer.protocol import events
from transfer.protocol.errors import ConnectionLost, LayoutMismatch, PeerUnreachable, TransferFailed, TransferTimeout
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.protocol.stats import MovingTime, TransferStats, TransferTotals
from transfer.staging import Staging

Event = TypeVar("Event")
Move = TypeVar("Move")
Result = TypeVar("Result")

PIPELINE_DEPTH = 2
"""Messages of one session in staging at a time: one moves while its neighbour is packed or landed."""

GRACE_S = 2.0
"""For operations in flight when their session fails; then their connection is closed. A peer that runs takes or drops
them in milliseconds. A stopped one would keep its sessions' staging buffers until their deadlines, and transfers to all
other peers would wait for them."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How long a session may take.

    deadline_s   of the whole session, absolute, on the event loop's clock
    timeout_s    the longest time without progress: at the sender from its opening on, at the receiver from the first
                 proven envelope on, because until then the prompt may stand in the sender's line
    """

    deadline_s: float
    timeout_s: float = math.inf


class Transfer(Generic[Event, Move]):
    """One session under way: feeds it events and obeys its instructions. `cancel` may be called at any time.

    Move         the instructions that move messages; subclasses obey them in `_move`
    transition   the session's `on`
    totals       of the sessions in this one's direction
    peer         whose share of the staging buffers it uses; empty: the one of this node's own receivers
    """

    def __init__(
        self,
        plan: TransferPlan,
        transition: Callable[[Event | events.Interruption], list[Move | events.CompleteSession | events.FailSession]],
        transport: Transport,
        totals: TransferTotals,
        staging: Staging,
        limits: TransferLimits,
        peer: str,
        clock: Callable[[], float],
    ) -> None:
        self.plan = plan
        self._transition = transition
        self._transport = transport
        self._totals = totals
        self._limits = limits
        self._deadline_s = limits.deadline_s
        self._clock = clock
        self._began_s = self._ended_s = clock()
        self._moving = MovingTime(clock)
        self._failure: TransferFailed | None = None
        self._complete = False
        self._at_work = 0
        self._settled = asyncio.Event()
        self._staging = staging
        self._peer = peer
        staging.session_opened(peer)
        self._pipeline = asyncio.Semaphore(PIPELINE_DEPTH)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer = self._timer_at(self._deadline_s)

    def cancel(self) -> None:
        """Fails the session, unless it has ended. Await its end to know that nothing touches your blocks."""
        self._on(events.Cancelled())

    def _progressed(self) -> None:
        """Something has moved, or is about to for the first time: it has `timeout_s` from now."""
        deadline_s = min(self._limits.deadline_s, asyncio.get_running_loop().time() + self._limits.timeout_s)
        if not self._ended and deadline_s != self._deadline_s:
            self._timer.cancel()
            self._deadline_s = deadline_s
            self._timer = self._timer_at(deadline_s)

    def _timer_at(self, deadline_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_at(deadline_s, lambda: self._on(events.DeadlinePassed()))

    def _on(self, event: Event | events.Interruption) -> None:
        for instruction in self._transition(event):
            self._obey(instruction)

    def _obey(self, instruction: Move | events.CompleteSession | events.FailSession) -> None:
        match instruction:
            case events.CompleteSession():
                self._complete = True
                self._end()
                self._completed(self._stats())
            case events.FailSession(cause, reason):
                self._failure = TransferFailed(cause, reason)
                self._transport.stats.session_failed(cause)
                self._transport.hasten(self.plan.nonce, asyncio.get_running_loop().time() + GRACE_S)
                self._end()
            case _:
                self._move(instruction)

    def _completed(self, stats: TransferStats) -> None:
        self._totals.add(stats)

    def _move(self, instruction: Move) -> None:
        """Hands the instruction's message to the subclass's own tasks; returns at once."""
        raise NotImplementedError

    @property
    def _ended(self) -> bool:
        return self._complete or self._failure is not None

    def _stats(self) -> TransferStats:
        return TransferStats(
            attention_tokens=self.plan.attention_tokens,
            attention_bytes=self.plan.attention_bytes,
            state_bytes=self.plan.state_bytes,
            messages=len(self.plan.messages),
            seconds=self._ended_s - self._began_s,
            attention_seconds=self._moving.attention_seconds,
            state_seconds=self._moving.state_seconds,
            hidden_seconds=self._moving.hidden_seconds,
        )

    def _end(self) -> None:
        self._ended_s = self._clock()
        self._timer.cancel()
        self._staging.session_ended(self._peer)
        self._stop()
        self._settle()

    def _stop(self) -> None:
        """Stops taking in work; called once, when the session has just ended."""
        raise NotImplementedError

    async def _at_callers_blocks(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs the caller's pack or land until what it enqueued is done; the session's end is reported only then."""
        self._at_work += 1
        try:
            return await work
        finally:
            self._at_work -= 1
            self._settle()

    def _settle(self) -> None:
        if self._ended and not self._at_work:
            self._settled.set()

    async def _wait(self) -> None:
        """Waits until the session has ended and nothing touches the caller's blocks; raises the session's failure."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    async def _take_staging(self, message: PlannedMessage) -> StagingBuffer:
        """A buffer for this message, within the pool's bound and PIPELINE_DEPTH of this session."""
        await self._pipeline.acquire()
        try:
            buffer = await self._staging.take(message.num_bytes, self._deadline_s, self._peer)
        except BaseException:
            self._pipeline.release()
            raise
        self._moving.began(message)
        return buffer

    def _give_staging(self, message: PlannedMessage, buffer: StagingBuffer) -> None:
        """Gives the buffer back when nothing reads or writes it any more."""
        self._moving.ended(message)
        self._staging.give(buffer, self._peer)
        self._pipeline.release()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the work as a task; its error fails the session."""
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._broken_by(error)

    def _broken_by(self, error: Exception) -> None:
        self._on(interruption(error))
        if self._failure is not None and self._failure.__cause__ is None:
            self._failure.__cause__ = error


def interruption(error: Exception) -> events.Interruption:
    """The session event for an error of the transport, the caller or this side."""
    match error:
        case ConnectionLost() | PeerUnreachable():
            return events.PeerLost(str(error))
        case TransferTimeout():
            return events.DeadlinePassed()
        case LayoutMismatch():
            return events.Broken(events.Cause.WRONG_MESSAGE, str(error))
        case _:
            return events.Broken(events.Cause.LOCAL_ERROR, f"{type(error).__name__}: {error}")
