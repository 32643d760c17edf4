"""The limit for a node's silence in a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.wire.errors import NodeStalled
from router.cluster.nodes import NodeEntry


@asynccontextmanager
async def responsive(node: NodeEntry, timeout_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Raises NodeStalled in its block at the limit that it yields, and when the node's engine stands still.

    timeout_s   until the limit; None: none, for a prompt may wait long for its turn
    """
    try:
        async with asyncio.timeout(timeout_s) as limit:
            with node.ends_when_stalled(limit):
                yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        silence = f"it has not answered the call within {timeout_s} s (first_event_timeout_s)"
        why = f"its engine stands still, {node.status.stalled_s:.1f} s now" if node.stalled else silence
        raise NodeStalled(node.info.name, why) from None
