"""The table of registered nodes, with a client to each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from headrace.cache.conversion import conversion_refusal
from headrace.wire.client import NodeClient
from headrace.wire.node_messages import NodeInfo, NodeStatus, Peer, Role, transfer_refusal
from router.cluster.left_requests import LeftRequests
from router.cluster.lost_nodes import LostNode, LostNodes
from router.cluster.node_id import NodeId
from router.errors import LayoutRefused, NameTaken

log = logging.getLogger(__name__)

MISSED_HEARTBEATS = 3
"""After so many a node that does not answer either is dead; it is asked after one less."""


@dataclass
class NodeEntry:
    """A registered node.

    replaced   earlier incarnations that lost the name to this one, or to one that it replaced
    suspect    a call to it was lost, and neither heartbeat nor answer has come since
    stalled    its engine stands still, by its own report: its calls were ended, and it gets no work
    draining   it gets no more work, and its requests move away
    has_left   it was stopped, and ends its calls after a grace period
    calls      calls in progress: its client stays open for them
    """

    info: NodeInfo
    status: NodeStatus
    client: NodeClient
    expires_at_s: float
    replaced: frozenset[int] = frozenset()
    suspect: bool = False
    stalled: bool = False
    draining: bool = False
    has_left: bool = False
    calls: int = 0
    limits: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def id(self) -> NodeId:
        return (self.info.name, self.info.incarnation)

    @property
    def role(self) -> Role:
        """The work for which it is preferred now; `info.role` is the role with which it started."""
        return self.status.role or self.info.role

    def switched(self, role: Role, role_switches: int) -> None:
        """Takes over a switch of its role; not an earlier one than is known, whose report came late."""
        if role_switches > self.status.role_switches:
            self.status = replace(self.status, role=role, role_switches=role_switches)

    def reaches(self, receiver: NodeInfo) -> bool:
        """True unless its last heartbeat reported a failed link check to the receiver, which may be out of date."""
        return all(link.error is None for link in self.status.links if link.peer == receiver.name)

    @contextmanager
    def ends_when_stalled(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Lets `limit` expire at once when the node's engine is reported to stand still."""
        self.limits.add(limit)
        try:
            if self.stalled:
                self._expire(limit)
            yield
        finally:
            self.limits.discard(limit)

    def report(self, status: NodeStatus, *, stalled_after_s: float) -> None:
        """Takes over a status that has just arrived: the node is there."""
        known, self.status, self.suspect = self.status, status, False
        if known.role is not None:
            self.switched(known.role, known.role_switches)
        was_stalled, self.stalled = self.stalled, status.stalled_s >= stalled_after_s
        if self.stalled and not was_stalled:
            log.error("node %s stands still for %.1f s: its requests are moved", self.info.name, status.stalled_s)
            for limit in self.limits:
                self._expire(limit)

    def _expire(self, limit: asyncio.Timeout) -> None:
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())


class NodeTable:
    """Registered nodes by name. `clock` yields seconds; `connect` opens a client to a node.

    roles_are_fixed   a node does the work of its role alone; otherwise its role says what it is preferred for
    left              requests that this router has left on nodes
    """

    def __init__(
        self,
        heartbeat_s: float,
        clock: Callable[[], float],
        connect: Callable[[NodeInfo], NodeClient],
        *,
        roles_are_fixed: bool = True,
        stalled_after_s: float = 15.0,
        node_return_timeout_s: float = 120.0,
    ) -> None:
        self.roles_are_fixed = roles_are_fixed
        self.left = LeftRequests()
        self._stalled_after_s = stalled_after_s
        self._lost = LostNodes(node_return_timeout_s, self.does)
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._first_expected_by_s = self._new_expiry_s()
        self._roles_seen: set[Role] = set()
        self._connect = connect
        self._nodes: dict[str, NodeEntry] = {}
        self._retired: list[NodeEntry] = []
        self._watchers: list[Callable[[], None]] = []
        self._status_watchers: list[Callable[[NodeEntry], None]] = []
        self._leave_watchers: list[Callable[[NodeEntry], None]] = []
        self._max_model_tokens: int | None = None

    def watch(self, changed: Callable[[], None]) -> None:
        """Calls `changed` after each node added or removed; `all` lists the present ones."""
        self._watchers.append(changed)

    def watch_status(self, reported: Callable[[NodeEntry], None]) -> None:
        """Calls `reported` with each node that has just reported its status, new ones included."""
        self._status_watchers.append(reported)

    def watch_leaving(self, left: Callable[[NodeEntry], None]) -> None:
        """Calls `left` with each node that stops in order, and still ends its calls."""
        self._leave_watchers.append(left)

    def register(self, info: NodeInfo, status: NodeStatus) -> bool:
        """Adds a node (True) or renews its registration (False). A new incarnation takes its name over at once.

        Raises LayoutRefused when its layout or transfer version cannot serve with the other nodes'; NameTaken when a
        later incarnation holds its name.
        """
        known = self._nodes.get(info.name)
        if known is not None and info.incarnation in known.replaced:
            # Two processes with one name: each heartbeat of one would cost the other its client and cache index.
            raise NameTaken(
                f"node {info.name} at {info.address}: the name is taken, {known.info.address} registered later; "
                "start one of them with another --name"
            )
        for other in self._nodes.values():
            refusal = None if other is known else _refusal(info, other.info)
            if refusal is not None:
                raise LayoutRefused(f"node {info.name}: {refusal}")
        expires_at_s = self._new_expiry_s()
        if known is not None and known.info == info:
            known.expires_at_s = expires_at_s
            self._report(known, status)
            return False
        replaced: frozenset[int] = frozenset()
        if known is not None:
            replaced = (known.replaced | {known.info.incarnation}) - {info.incarnation}
            self._retire(known)
        self._lost.remove(info.name)
        self._roles_seen.add(status.role or info.role)
        self._nodes[info.name] = node = NodeEntry(info, status, self._connect(info), expires_at_s, replaced)
        self._report(node, status)
        self._notify()
        return True

    def receivers_of(self, sender: str) -> list[Peer]:
        """Peers that the node of this name may have to send to: all others, because roles change at any time."""
        others = (node.info for node in self.all() if node.info.name != sender)
        return [Peer(info.name, info.incarnation, info.transfer_address, info.device) for info in others]

    def senders_to(self, receiver: NodeInfo, work: Role | None = None) -> list[NodeEntry]:
        """Live nodes for this work that can transfer to this one, by name; None: for any work."""
        others = (node for node in self.live(work) if node.info.name != receiver.name)
        return [node for node in others if transfer_refusal(node.info.device, receiver.device) is None]

    def named(self, name: str) -> NodeEntry | None:
        """The node that has this name now."""
        return self._nodes.get(name)

    def leave(self, name: str, incarnation: int) -> None:
        """Removes a node, which nobody waits for; calls in progress on it may finish."""
        self._lost.remove(name)
        node = self._nodes.get(name)
        if node is not None and node.info.incarnation == incarnation:
            node.has_left = True
            self._retire(node)
            for left in self._leave_watchers:
                left(node)

    def late(self) -> list[NodeEntry]:
        """Nodes that have missed all but one of the heartbeats that a dead one misses: ask them."""
        asked_from_s = self._clock() + self._heartbeat_s
        return [node for node in self._nodes.values() if node.expires_at_s <= asked_from_s]

    def answered(self, node: NodeEntry, info: NodeInfo, status: NodeStatus) -> None:
        """Renews the registration of a node that answered a question; another process in its place is its death."""
        if self._nodes.get(node.info.name) is not node:
            return
        if info.incarnation != node.info.incarnation:
            log.warning("node %s has ended: another process answers at %s", node.info.name, node.info.address)
            self._lose(node)
            return
        if node.expires_at_s <= self._clock():
            log.info("node %s missed its heartbeats, but answers", node.info.name)
        node.expires_at_s = self._new_expiry_s()
        self._report(node, status)

    def unanswered(self, node: NodeEntry, cause: Exception) -> None:
        """Gives no more work to a node that did not answer; removes it once it has missed its heartbeats, too."""
        if self._nodes.get(node.info.name) is not node:
            return
        node.suspect = True
        if node.expires_at_s <= self._clock():
            log.warning("node %s missed its heartbeats and does not answer: taken for dead: %s", node.info.name, cause)
            self._lose(node)

    def does(self, role: Role, work: Role) -> bool:
        """True if nodes of this role do this work."""
        return role.includes(work) or not self.roles_are_fixed

    def live(self, work: Role | None = None) -> list[NodeEntry]:
        """Nodes that may be given this work, by name: those that are neither suspect nor stalled, nor draining.
        None: any work."""
        found = (node for node in self.all() if work is None or self.does(node.role, work))
        return [node for node in found if not node.suspect and not node.stalled and not node.draining]

    @property
    def is_ready(self) -> bool:
        """True while there is a node that generates answers."""
        return bool(self.live(Role.DECODE))

    def awaited(self, work: Role) -> list[LostNode]:
        """Nodes for this work that may come back, the next one first: lost ones, and those present that get none."""
        now_s = self._clock()
        nodes = (node for node in self.all() if self.does(node.role, work) and (node.suspect or node.stalled))
        return [LostNode(node.info, now_s) for node in nodes] + self._lost.awaited(work, now_s)

    def may_come(self, work: Role) -> bool:
        """True while a node for this work is awaited, and until the first registers: those that serve register with a
        restarted router within a heartbeat."""
        is_first = not any(self.does(role, work) for role in self._roles_seen)
        return (is_first and self._clock() < self._first_expected_by_s) or bool(self.awaited(work))

    def all(self) -> list[NodeEntry]:
        """Every registered node, suspects included, by name."""
        return sorted(self._nodes.values(), key=lambda node: node.info.name)

    @property
    def max_model_tokens(self) -> int | None:
        """Longest sequence that every node can hold; None without nodes. May be read from any thread."""
        return self._max_model_tokens

    @asynccontextmanager
    async def in_use(self, node: NodeEntry) -> AsyncIterator[NodeClient]:
        """Keeps the node's client open while a call runs on it, even if the node leaves meanwhile."""
        node.calls += 1
        try:
            yield node.client
        finally:
            node.calls -= 1
            await self.close_retired()

    async def close_retired(self) -> None:
        """Closes the clients of removed nodes on which no call runs."""
        while unused := [node for node in self._retired if node.calls == 0]:  # anew: others may close some meanwhile
            self._retired.remove(unused[0])
            await unused[0].client.close()

    async def close(self) -> None:
        """Removes every node; no call may be running."""
        for node in self.all():
            self._retire(node)
        await self.close_retired()

    def _report(self, node: NodeEntry, status: NodeStatus) -> None:
        node.report(status, stalled_after_s=self._stalled_after_s)
        for reported in self._status_watchers:
            reported(node)

    def _new_expiry_s(self) -> float:
        return self._clock() + self._heartbeat_s * MISSED_HEARTBEATS

    def _lose(self, node: NodeEntry) -> None:
        self._lost.add(node.info, self._clock())
        self._retire(node)

    def _retire(self, node: NodeEntry) -> None:
        del self._nodes[node.info.name]
        self._retired.append(node)
        self._notify()

    def _notify(self) -> None:
        self._max_model_tokens = min((node.info.max_model_tokens for node in self._nodes.values()), default=None)
        for changed in self._watchers:
            changed()


def _refusal(info: NodeInfo, other: NodeInfo) -> str | None:
    """The reason why two nodes cannot serve one cluster, with both values; None if they can.

    Block sizes and state dtypes may differ: transfers convert them.
    """
    if info.transfer_version != other.transfer_version:
        return (
            f"transfer_version {info.transfer_version} != {other.transfer_version} of {other.name}; "
            "run one release on all nodes"
        )
    difference = conversion_refusal(info.layout, other.layout)
    if difference is not None:
        return (
            f"{difference} of {other.name}; start all nodes with one model and dtype, "
            "and with speculation.drafter: mtp all or none"
        )
    can_transfer = transfer_refusal(info.device, other.device) is None
    if can_transfer and info.max_message_bytes != other.max_message_bytes:
        return (
            f"max_message_bytes {info.max_message_bytes} != {other.max_message_bytes} of {other.name}; "
            "start all nodes with one max_message_bytes"
        )
    return None
