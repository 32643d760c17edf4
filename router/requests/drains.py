"""Drains: a node gets no more work, and its running requests move to other nodes, a few at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from headrace.wire.errors import NodeError
from headrace.wire.node_messages import NodeStatus, Role, transfer_refusal
from router.cluster.nodes import NodeEntry, NodeTable
from router.errors import ApiError
from router.metrics import RouterMetrics
from router.requests.moves import Movable, MoveOutcome
from router.requests.relocation import may_relocate
from router.requests.table import RequestTable
from router.routing.receivers import choose_receiver
from router.routing.snapshots import Snapshots

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Moves from one node at a time: each halts an answer until it has landed."""
POLL_S = 0.02
STAYED_PAUSE_S = 0.5  # before a request is moved again that nobody had room for
STOP_TIMEOUT_S = 10.0
"""For the node's answer to Stop. It touches no engine, but a node of a busy host may get no processor for seconds."""


@dataclass(frozen=True)
class Drained:
    """Requests of a drained node, by their end. `ended`: their answers were complete before they could move."""

    node: str
    moved: int
    recomputed: int
    ended: int
    seconds: float


class Drains:
    """Drains any number of nodes; also those that leave by themselves, until they end their calls."""

    def __init__(
        self,
        nodes: NodeTable,
        table: RequestTable,
        snapshots: Snapshots,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._table = table
        self._snapshots = snapshots
        self._metrics = metrics
        self._clock = clock
        self._leaving: set[asyncio.Task[Drained]] = set()
        self._sent: dict[str, tuple[NodeStatus, int]] = {}  # by node: its last report, and requests sent since
        nodes.watch_leaving(self._left)

    async def drain(self, name: str, *, timeout_s: float, keep: bool) -> Drained:
        """Returns once the node serves nothing for this router; what has not moved by `timeout_s` begins again
        elsewhere. `keep`: the node stays, without work; else it is told to stop.

        Raises ApiError: 404 for a node that is not registered, 409 when no other node decodes, 503 when it does not
        take the order to stop.
        """
        node = self._nodes.named(name)
        if node is None:
            message = f"no node {name!r} is registered; see /cluster for those that are"
            raise ApiError(HTTPStatus.NOT_FOUND, message, code="node_not_found")
        if not any(other is not node for other in self._nodes.live(Role.DECODE)):
            message = f"no other node decodes than {name}: its requests could go nowhere; add one first"
            raise ApiError(HTTPStatus.CONFLICT, message, code="last_decode_node")
        node.draining = True
        drained = await self._empty(node, self._clock() + timeout_s)
        if not keep:
            await self._stop(node)
        return drained

    def _left(self, node: NodeEntry) -> None:
        """The node ends its calls after its own grace period, whatever has become of them by then."""
        if not node.draining and self._table.served_on(node):
            task = asyncio.create_task(self._empty(node, None))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        for task in list(self._leaving):
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _empty(self, node: NodeEntry, deadline_s: float | None) -> Drained:
        """Moves the node's requests until it serves none; at the deadline those that are left begin again elsewhere."""
        began_s = self._clock()
        outcomes: dict[Movable, MoveOutcome] = {}
        moving: dict[Movable, asyncio.Task[None]] = {}
        try:
            while served := self._table.served_on(node):
                moving = {request: task for request, task in moving.items() if not task.done()}
                if deadline_s is not None and self._clock() >= deadline_s:
                    for request in served:
                        outcomes[request] = MoveOutcome.RECOMPUTED
                        await request.leave_nodes()
                for request in served:
                    outcomes.setdefault(request, MoveOutcome.ENDED)
                    is_due = len(moving) < AT_ONCE and request not in moving and may_relocate(request.life.state)
                    if is_due and (receiver := self._receiver(node, request)) is not None:
                        moving[request] = asyncio.create_task(self._move(request, receiver, outcomes))
                await asyncio.sleep(POLL_S)
            await asyncio.gather(*moving.values())  # they know what has become of the last ones
        finally:
            for task in moving.values():
                task.cancel()
        counts = Counter(outcomes.values())
        for outcome, count in counts.items():
            self._metrics.requests_drained(outcome.value, count)
        drained = Drained(
            node=node.info.name,
            moved=counts[MoveOutcome.MOVED],
            recomputed=counts[MoveOutcome.RECOMPUTED],
            ended=counts[MoveOutcome.ENDED] + counts[MoveOutcome.STAYED],
            seconds=self._clock() - began_s,
        )
        log.info("drained: %s", drained)
        return drained

    async def _move(self, request: Movable, receiver: NodeEntry, outcomes: dict[Movable, MoveOutcome]) -> None:
        began_s = self._clock()
        outcome = await request.move(receiver)
        outcomes[request] = outcome
        if outcome is MoveOutcome.MOVED:
            self._metrics.request_moved(self._clock() - began_s)
        elif outcome is MoveOutcome.STAYED:
            await asyncio.sleep(STAYED_PAUSE_S)

    def _receiver(self, sender: NodeEntry, request: Movable) -> NodeEntry | None:
        num_tokens = len(request.life.request.tokens) + len(request.life.generated)
        live = {node.info.name: node for node in self._nodes.live()}
        reachable = {node.info.name for node in self._nodes.live() if reaches(sender, node)}
        roles = {name: node.role for name, node in live.items() if name in reachable}
        candidates = self._snapshots.take(roles, {}, num_tokens, now_s=self._clock())
        sent = {name: self._sent_since(node) for name, node in live.items()}
        chosen = choose_receiver(candidates, sender.info.name, num_tokens, sent)
        if chosen is None:
            return None
        receiver = live[chosen.name]
        self._sent[chosen.name] = (receiver.status, sent[chosen.name] + 1)
        return receiver

    def _sent_since(self, node: NodeEntry) -> int:
        """Requests that were sent to the node since it reported its load."""
        status, count = self._sent.get(node.info.name, (node.status, 0))
        return count if status is node.status else 0

    async def _stop(self, node: NodeEntry) -> None:
        try:
            async with self._nodes.in_use(node) as client:
                await client.stop(timeout_s=STOP_TIMEOUT_S)
        except NodeError as error:
            message = f"node {error}; it is drained, and has not taken the order to stop: end its process"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="node_lost", retry_after_s=2) from error


def reaches(sender: NodeEntry, receiver: NodeEntry) -> bool:
    """True if the one can send to the other, as far as is known."""
    is_possible = transfer_refusal(sender.info.device, receiver.info.device) is None
    return sender is not receiver and is_possible and sender.reaches(receiver.info)
