"""A node's heartbeat: registers with the router and renews the registration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from headrace.wire.client import RegistryClient
from headrace.wire.errors import NodeError, RequestRefused
from headrace.wire.messages import NodeInfo, NodeStatus, Peer
from headrace.wire.tls import Identity

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
RETRY_S = 0.25
REFUSED_RETRY_S = 5.0  # the answer changes only when another node ends or the router is another one


class Registration:
    """Keeps one node registered until stopped; tries an unreachable router again for ever.

    `meet` is called after each heartbeat with the peers that the router names; it must return at once.
    """

    def __init__(
        self,
        router: str,
        info: NodeInfo,
        status: Callable[[], Awaitable[NodeStatus]],
        meet: Callable[[Sequence[Peer]], None],
        identity: Identity | None,
    ) -> None:
        self._client = RegistryClient(router, identity)
        self._router = router
        self._info = info
        self._status = status
        self._meet = meet

    def start(self) -> None:
        self._task = asyncio.create_task(self._beat())

    async def stop(self) -> None:
        """Stops, and unregisters the node instead of letting the router miss its heartbeats."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        with suppress(NodeError):
            await self._client.leave(self._info.name, self._info.incarnation, timeout_s=CALL_TIMEOUT_S)
        await self._client.close()

    async def _beat(self) -> None:
        reported = ""
        while True:
            try:
                answer = await self._client.register(self._info, await self._status(), timeout_s=CALL_TIMEOUT_S)
                delay_s = answer.heartbeat_s
                self._meet(answer.peers)
                reported = ""
            except Exception as error:  # of any kind: a node without heartbeats is taken for dead
                is_refused = isinstance(error, RequestRefused)
                delay_s = REFUSED_RETRY_S if is_refused else RETRY_S
                # Logged once, not four times a second: a router that starts later is normal.
                if str(error) != reported:
                    reported = str(error)
                    level = logging.ERROR if is_refused else logging.WARNING
                    log.log(level, "%s is not registered with %s: %s", self._info.name, self._router, error)
            await asyncio.sleep(delay_s)
