"""Subscriptions to the nodes' cache updates: one task a node keeps the cluster index up to date."""

from __future__ import annotations

import asyncio
import logging

from headrace.wire.errors import NodeLost
from router.cluster.cluster_index import ClusterIndex, NodeIndex
from router.cluster.node_id import NodeId
from router.cluster.nodes import NodeEntry, NodeTable

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Subscriptions:
    """Subscribes to each registered node, and again whenever the stream breaks, until the node is removed.

    Keepalive breaks the stream of a process that stopped silently; a node that hangs otherwise misses its heartbeats,
    and its removal from the node table ends its task.
    """

    def __init__(self, nodes: NodeTable, index: ClusterIndex) -> None:
        self._nodes = nodes
        self._index = index
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self._closed = False

    def start(self) -> None:
        """Follows the registered nodes from now on."""
        self._nodes.watch(self._sync)
        self._sync()

    async def close(self) -> None:
        """Ends every call and opens no more."""
        self._closed = True
        tasks = list(self._tasks.values())
        self._sync()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _sync(self) -> None:
        registered = {} if self._closed else {node.id: node for node in self._nodes.all()}
        for node_id in self._tasks.keys() - registered.keys():
            self._tasks.pop(node_id).cancel()
            self._index.remove(node_id)
        for node_id in registered.keys() - self._tasks.keys():
            node = registered[node_id]
            known = self._index.add(node_id, node.info.layout.block_size)
            self._tasks[node_id] = asyncio.create_task(self._follow(node, known))

    async def _follow(self, node: NodeEntry, known: NodeIndex) -> None:
        logged = ""
        while True:
            try:
                await self._apply_updates(node, known)
            except Exception as error:  # a stale index costs hits at the worst, never an answer
                if str(error) != logged:
                    logged = str(error)
                    log.warning("the cache of %s is not followed: %s", node.info.name, error)
            known.lost()
            await asyncio.sleep(RETRY_S)

    async def _apply_updates(self, node: NodeEntry, known: NodeIndex) -> None:
        async with self._nodes.in_use(node) as client, client.cache_updates() as call:
            async for update in call:
                known.apply(update)
        raise NodeLost(node.info.name, "ended its stream of cache updates")
