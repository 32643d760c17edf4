"""Switches nodes as the planner of roles advises."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from router.cluster.nodes import NodeTable
from router.cluster.role_switch import RoleSwitch
from router.errors import ApiError
from router.metrics import RouterMetrics
from router.routing.role_planner import RolePlanner

log = logging.getLogger(__name__)


class RoleChanges:
    """Asks the planner once a heartbeat, and obeys it."""

    def __init__(
        self,
        nodes: NodeTable,
        switch: RoleSwitch,
        metrics: RouterMetrics,
        *,
        window_s: float,
        heartbeat_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._switch = switch
        self._metrics = metrics
        self._planner = RolePlanner(window_s)
        self._heartbeat_s = heartbeat_s
        self._clock = clock

    async def run(self) -> None:
        """Plans until it is cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self._plan()

    async def _plan(self) -> None:
        nodes = {node.info.name: (node.role, node.status) for node in self._nodes.live()}
        change = self._planner.sample(self._clock(), nodes)
        if change is None:
            return
        log.info("role planner: %s becomes a %s node: %s", change.node, change.role.value, change.reason)
        try:
            await self._switch.switch(change.node, change.role)
        except ApiError as error:  # it has left meanwhile, say: the next window asks again
            log.warning("role planner: %s keeps its role: %s", change.node, error.message)
            return
        self._metrics.role_changed(change.role)
