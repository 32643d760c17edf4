"""Asks nodes whose heartbeats are late whether they still answer: only one that does not is taken for dead.

Heartbeats alone prove too little. A busy machine delays them while the node works, and a router whose own event loop
stood still finds all of them late, those that wait to be read included.
"""

from __future__ import annotations

import asyncio

from headrace.wire.errors import NodeError
from router.cluster.node_id import NodeId
from router.cluster.nodes import NodeEntry, NodeTable

ANSWER_TIMEOUT_S = 10.0
"""For a node that stands still. One that is stopped or cut off fails sooner: the connection breaks by its keepalive."""


class Liveness:
    """Looks for late nodes twice a heartbeat, and asks each of them on its own."""

    def __init__(self, nodes: NodeTable, heartbeat_s: float) -> None:
        self._nodes = nodes
        self._heartbeat_s = heartbeat_s
        self._asking: dict[NodeId, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Looks until it is cancelled; no question is open when it returns."""
        try:
            while True:
                await asyncio.sleep(self._heartbeat_s / 2)
                for node in self._nodes.late():
                    if node.id not in self._asking:
                        self._asking[node.id] = asyncio.create_task(self._ask(node))
                await self._nodes.close_retired()
        finally:
            open_questions = list(self._asking.values())
            for question in open_questions:
                question.cancel()
            await asyncio.gather(*open_questions, return_exceptions=True)

    async def _ask(self, node: NodeEntry) -> None:
        try:
            async with self._nodes.in_use(node) as client:
                answering = asyncio.ensure_future(client.describe(timeout_s=ANSWER_TIMEOUT_S))
                try:
                    if not (await asyncio.wait({answering}, timeout=self._heartbeat_s))[0]:
                        node.suspect = True  # no new work while it takes its time
                    info, status = await answering
                finally:
                    answering.cancel()
            self._nodes.answered(node, info, status)
        except (NodeError, ValueError) as error:
            self._nodes.unanswered(node, error)
        finally:
            del self._asking[node.id]
