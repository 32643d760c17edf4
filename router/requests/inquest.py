"""Did a node die whose connection was lost? A starved machine answers no ping in time, and its nodes live on."""

from __future__ import annotations

import asyncio

from headrace.wire.errors import NodeError
from router.cluster.node_id import NodeId
from router.cluster.nodes import NodeTable

INQUEST_S = 5.0
"""How long a node may take to prove that it lives. A dead one proves nothing: its request ends so much later."""
ASK_AGAIN_S = 0.1


async def has_outlived(nodes: NodeTable, lost: NodeId) -> bool:
    """True once this very process answers, with an engine that turns; False if another has its name, or after
    INQUEST_S. A heartbeat proves nothing: it may have been on its way when the node died."""
    name, incarnation = lost
    try:
        async with asyncio.timeout(INQUEST_S):
            while True:
                node = nodes.named(name)  # None: it was taken for dead, and may register again
                if node is not None:
                    if node.info.incarnation != incarnation:
                        return False
                    try:
                        async with nodes.in_use(node) as client:
                            info, status = await client.describe(timeout_s=INQUEST_S)
                    except (NodeError, ValueError):
                        pass  # nobody is there, or not yet again
                    else:
                        if info.incarnation != incarnation:
                            return False
                        if not status.stalled_s:
                            return True
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError:
        return False
