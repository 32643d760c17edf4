"""A node's heartbeats: registers with every router and renews the registrations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from headrace.wire.client import RegistryClient
from headrace.wire.connection_options import CONTROL_SILENCE_S
from headrace.wire.errors import NodeError, RequestRefused
from headrace.wire.node_messages import NodeInfo, NodeStatus, Peer, RegisterReply
from headrace.wire.tls import Identity

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
RETRY_S = 0.25
REFUSED_RETRY_S = 5.0  # the answer changes only when another node ends or the router is another one


class KnownPeers:
    """The peers that routers named in their last answers. Pure.

    A router that is lost names nothing new: what it named counts only while no other router answers. Of two peers with
    one name the last one named counts: the other is an incarnation that has ended.
    """

    def __init__(self) -> None:
        self._named: dict[str, Sequence[Peer]] = {}  # by router, the last to answer at the end
        self._lost: set[str] = set()

    def answered(self, router: str, peers: Sequence[Peer]) -> None:
        self._named.pop(router, None)
        self._named[router] = peers
        self._lost.discard(router)

    def lost(self, router: str) -> None:
        self._lost.add(router)

    @property
    def all(self) -> list[Peer]:
        answering = [router for router in self._named if router not in self._lost]
        routers = answering or list(self._named)
        return list({peer.name: peer for router in routers for peer in self._named[router]}.values())


class Registrations:
    """Keeps one node registered with each of its routers until stopped; no router waits for another.

    meet      called with all known peers after each answer; must return at once
    abandon   called with orphans that a router names as its own and needs no longer; must return at once
    """

    def __init__(
        self,
        routers: Sequence[str],
        info: NodeInfo,
        status: Callable[[], Awaitable[NodeStatus]],
        meet: Callable[[Sequence[Peer]], None],
        abandon: Callable[[Sequence[str]], None],
        identity: Identity | None,
        *,
        silence_s: float = CONTROL_SILENCE_S,
    ) -> None:
        self._peers = KnownPeers()
        self._meet = meet
        self._abandon = abandon
        clients = {router: RegistryClient(router, identity, silence_s=silence_s) for router in routers}
        self._each = [
            _Registration(router, client, info, status, self._answered, self._lost)
            for router, client in clients.items()
        ]

    def start(self) -> None:
        for each in self._each:
            each.start()

    def beat_now(self) -> None:
        """Reports the status at once instead of when the next heartbeats are due."""
        for each in self._each:
            each.news.set()

    async def stop(self, *, leave: bool) -> None:
        """Stops the heartbeats. `leave`: also unregisters the node, so that nobody waits for it. A crashed node does
        not leave: its supervisor starts it again, and requests wait for it."""
        await asyncio.gather(*(each.stop(leave=leave) for each in self._each))

    def _answered(self, router: str, answer: RegisterReply) -> None:
        self._peers.answered(router, answer.peers)
        self._meet(self._peers.all)
        if answer.abandoned:
            self._abandon(answer.abandoned)

    def _lost(self, router: str) -> None:
        self._peers.lost(router)


class _Registration:
    """Registers with one router, and tries again for ever while that is unreachable. Setting `news` ends a pause."""

    def __init__(
        self,
        router: str,
        client: RegistryClient,
        info: NodeInfo,
        status: Callable[[], Awaitable[NodeStatus]],
        answered: Callable[[str, RegisterReply], None],
        lost: Callable[[str], None],
    ) -> None:
        self._router = router
        self._client = client
        self._info = info
        self._status = status
        self._answered = answered
        self._lost = lost
        self.news = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._beat())

    async def stop(self, *, leave: bool) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if leave:
            with suppress(NodeError):
                await self._client.leave(self._info.name, self._info.incarnation, timeout_s=CALL_TIMEOUT_S)
        await self._client.close()

    async def _beat(self) -> None:
        reported = ""
        while True:
            self.news.clear()
            try:
                answer = await self._client.register(self._info, await self._status(), timeout_s=CALL_TIMEOUT_S)
                delay_s = answer.heartbeat_s
                self._answered(self._router, answer)
                reported = ""
            except Exception as error:  # of any kind: a node without heartbeats is taken for dead
                self._lost(self._router)
                is_refused = isinstance(error, RequestRefused)
                delay_s = REFUSED_RETRY_S if is_refused else RETRY_S
                # Logged once, not four times a second: a router that starts later is normal.
                if str(error) != reported:
                    reported = str(error)
                    level = logging.ERROR if is_refused else logging.WARNING
                    log.log(level, "%s is not registered with %s: %s", self._info.name, self._router, error)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self.news.wait()
