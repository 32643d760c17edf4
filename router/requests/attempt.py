"""One try of a request: its calls to nodes, and the tasks that read them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine

from headrace.request import Request
from headrace.wire.client import DecodeCall
from headrace.wire.errors import NodeError
from headrace.wire.messages import DecodeCommand
from router.cluster.nodes import NodeEntry
from router.requests.node_search import Placement


class Attempt:
    """One decode call with the prefill calls for it, or one prefill call alone.

    `placement` is the plan until its prefill has begun: a repeated one is planned anew. `over` is done when the attempt
    has nothing more to do, or holds the exception of a task that broke.

    A request that moves has two: its decode node's, and a `successor` at the node that receives it, whose `sender` is
    the first one until it has landed. `running` is the task that follows a successor.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call: DecodeCall | None = None
        self.placement: Placement | None = None
        self.decode_node: NodeEntry | None = None
        self.prefill: asyncio.Task[None] | None = None
        self.prefill_node: NodeEntry | None = None
        self.sender: Attempt | None = None
        self.successor: Attempt | None = None
        self.running: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def succeeded_by(self, successor: Attempt, work: Coroutine[None, None, None]) -> None:
        """Runs `work` as that of the successor; its error is this attempt's, too, while that waits."""
        self.successor, successor.sender = successor, self
        successor.running = asyncio.create_task(work)
        successor.running.add_done_callback(self._task_ended)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs `work` until it ends or the attempt is cancelled."""
        task = asyncio.create_task(work)
        self._keep(task)
        return task

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.over.done():
            self.over.set_exception(error)

    def end(self) -> None:
        """Marks the attempt as over; more than once does no harm."""
        if not self.over.done():
            self.over.set_result(None)

    def end_all(self) -> None:
        """Marks this attempt as over, and the one between which and this its request moves."""
        for attempt in (self.sender, self, self.successor):
            if attempt is not None:
                attempt.end()

    def forget_successor(self) -> None:
        """Ends the successor: the request stays here."""
        successor, self.successor = self.successor, None
        if successor is not None:
            successor.end()
            successor.sender = None
            if successor.running is not None:
                self._keep(successor.running)

    def sender_done(self) -> None:
        """Ends the sender: it has sent everything, or cannot."""
        if self.sender is not None:
            self.sender.end()
            self.sender = None

    async def send(self, command: DecodeCommand) -> None:
        """Sends to the decode node. If it is lost, the task that reads its events reports that."""
        if self.call is not None:
            with contextlib.suppress(NodeError):
                await self.call.send(command)

    def cancel_prefill(self) -> None:
        """Cancels the prefill call, unless its own task is running."""
        if self.prefill is not None and self.prefill is not asyncio.current_task():
            self.prefill.cancel()

    async def cancel(self) -> None:
        """Cancels all calls and waits until they are left."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
