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
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call: DecodeCall | None = None
        self.placement: Placement | None = None
        self.decode_node: NodeEntry | None = None
        self.prefill: asyncio.Task[None] | None = None
        self.prefill_node: NodeEntry | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs `work` until it ends or the attempt is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.over.done():
            self.over.set_exception(error)

    def end(self) -> None:
        """Marks the attempt as over; more than once does no harm."""
        if not self.over.done():
            self.over.set_result(None)

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
