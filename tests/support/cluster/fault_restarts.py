"""Processes that end and come back: the router, nodes that are asked to stop, engines that stand still.

Every fault counts as a round, whether or not it met a session.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.cluster.fault_cluster import FaultCluster
from tests.support.cluster.fault_node import STALL
from tests.support.cluster.fault_rounds import ENGINE
from tests.support.cluster.fault_row import Row


def with_settings(**settings: Any) -> Callable[[Path, Path], AbstractAsyncContextManager[FaultCluster]]:
    """Two prefill and two decode nodes, with sessions of the default deadline."""

    @asynccontextmanager
    async def cluster_of(model: Path, folder: Path) -> AsyncIterator[FaultCluster]:
        cluster = FaultCluster(model, folder, **{"num_prefill": 2, "num_decode": 2, "engine": ENGINE} | settings)
        await asyncio.to_thread(cluster.__enter__)
        try:
            yield cluster
        finally:
            await asyncio.to_thread(cluster.__exit__)

    return cluster_of


async def router_killed(cluster: FaultCluster, dice: random.Random, row: Row) -> None:
    """Started again at once, as a supervisor does."""
    row.fault_now()
    cluster.processes["router"].kill()
    await asyncio.to_thread(cluster.processes["router"].wait)
    await asyncio.to_thread(cluster.restart_router)
    await asyncio.to_thread(cluster.wait_for_nodes, len(cluster.node_names))
    row.rounds += 1


async def stopped_in_turn(cluster: FaultCluster, dice: random.Random, row: Row) -> None:
    """SIGTERM: a node ends by itself, without a complaint; the next one's turn comes when it is back."""
    name = roles_in_turn(cluster)[row.rounds % len(cluster.node_names)]
    process = cluster.processes[name]
    row.fault_now()
    await asyncio.to_thread(process.stop)
    assert process.exit_status == 0, f"{name} ended with {process.exit_status}: {cluster.logs()}"
    await asyncio.to_thread(cluster.restart, name)
    row.rounds += 1


def roles_in_turn(cluster: FaultCluster) -> list[str]:
    """p0, d0, p1, d1."""
    return sorted(cluster.node_names, key=lambda name: name[1:])


async def engine_stalled(cluster: FaultCluster, dice: random.Random, row: Row) -> None:
    """Its thread never ends a turn again; the node must notice, and end."""
    name = roles_in_turn(cluster)[(row.rounds + dice.choice((0, 2))) % len(cluster.node_names)]
    process = cluster.processes[name]
    row.fault_now()
    process.kill(STALL)
    await asyncio.to_thread(process.wait)
    assert not process.is_alive, f"{name} stands still and lives: {cluster.logs()}"
    await asyncio.to_thread(cluster.restart, name)
    row.rounds += 1


async def killed_again_and_again(cluster: FaultCluster, dice: random.Random, row: Row) -> None:
    """Decode nodes in turn, each as soon as the other is back: a long answer moves several times."""
    name = f"d{row.rounds % 2}"
    row.fault_now()
    cluster.processes[name].kill()
    await asyncio.to_thread(cluster.processes[name].wait)
    await asyncio.to_thread(cluster.restart, name)
    row.rounds += 1
