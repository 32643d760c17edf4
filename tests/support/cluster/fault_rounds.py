"""Faults at single nodes and of the network between them: each is committed, met by a session, and undone."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cluster.cluster import with_engine
from tests.support.cluster.fault_cluster import FaultCluster
from tests.support.cluster.fault_row import Row
from tests.support.cluster.netns import Cut, routed_namespaces
from transfer.ucx import UcxConfig

DEADLINE_S = 1.5
"""Of every session, but where a network is cut: what a stopped process costs at most."""
STOPPED_S = 2.0
LATE_S = 2.0
CUT_S = (1.5, 4.0)
"""Some are over before the router gives the nodes up. Sessions have a minute: only the transport knows in time."""
CUT_KNOWN_S = 6.0
ENGINE = with_engine(max_step_tokens=48, max_running=6, cache_bytes=16 << 20)
"""Small steps: a prompt takes ten of them, and its session is open as long."""

SMALL_CLUSTER: dict[str, Any] = {
    "num_prefill": 2,
    "num_decode": 2,
    "engine": ENGINE,
    "decode": {"reservation_timeout_s": DEADLINE_S},
}


Round = Callable[[FaultCluster, random.Random, Row], Awaitable[None]]
"""Commits one fault, sees what comes of it, and undoes it."""


@asynccontextmanager
async def on_one_host(model: Path, folder: Path, **faults: Any) -> AsyncIterator[FaultCluster]:
    cluster = FaultCluster(model, folder, **SMALL_CLUSTER, faults=faults)
    await asyncio.to_thread(cluster.__enter__)
    try:
        yield cluster
    finally:
        await asyncio.to_thread(cluster.__exit__)


def with_faults(**faults: Any) -> Callable[[Path, Path], Any]:
    return lambda model, folder: on_one_host(model, folder, **faults)


# ---------------------------------------------------------------- a process dies, or stops for a while


def killed(role: str) -> Round:
    async def round_(cluster: FaultCluster, dice: random.Random, row: Row) -> None:
        name = f"{role}{dice.randrange(2)}"
        at_s = row.fault_now()
        cluster.processes[name].kill()
        others = survivors(cluster, name)
        await see_known(cluster, row, at_s, others)
        await asyncio.to_thread(cluster.processes[name].wait)
        await asyncio.to_thread(cluster.restart, name)
        # The later ones of the sessions that were open; one that was not told fails at its deadline, which shows here.
        later = cluster.journal("failed", at_s, others)[1:]
        row.known_s += [it["at"] - at_s for it in later if it["at"] - at_s < DEADLINE_S + 0.5]

    return round_


def stopped(role: str) -> Round:
    async def round_(cluster: FaultCluster, dice: random.Random, row: Row) -> None:
        name = f"{role}{dice.randrange(2)}"
        at_s = row.fault_now()
        cluster.processes[name].kill(signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)  # what is tested is a stop that outlasts the deadline
        finally:
            cluster.processes[name].kill(signal.SIGCONT)
        await see_known(cluster, row, at_s, survivors(cluster, name))

    return round_


def survivors(cluster: FaultCluster, victim: str) -> list[str]:
    return [name for name in cluster.node_names if name != victim]


async def see_known(cluster: FaultCluster, row: Row, at_s: float, names: list[str]) -> None:
    """A survivor knew when its first session failed."""
    first_s = await first_failed_s(cluster, row, at_s, names, DEADLINE_S + 0.5)
    if first_s is not None:
        row.known_s.append(first_s - at_s)


async def first_failed_s(
    cluster: FaultCluster, row: Row, at_s: float, names: list[str], within_s: float
) -> float | None:
    """The round counts when some survivor's session failed of it: when it did.

    Sessions that are open now fail `within_s`, whatever happens: when none has by then, there was none.
    """
    while not (failed := cluster.journal("failed", at_s, names)):
        if time.monotonic() > at_s + within_s:
            row.missed += 1
            return None
        await asyncio.sleep(0.02)
    row.rounds += 1
    return float(failed[0]["at"])


# ---------------------------------------------------------------- the network damages, delays, or is cut


async def damaged(cluster: FaultCluster, dice: random.Random, row: Row) -> None:
    """Nodes commit these themselves, all the time: a round is a part with a flipped bit."""
    failed = cluster.journal("failed")
    faults = cluster.journal("fault")
    known = [next((f["at"] for f in failed if f["at"] >= it["at"] and f["node"] == it["node"]), None) for it in faults]
    row.rounds = len(faults)
    row.known_s = [known_s - it["at"] for it, known_s in zip(faults, known, strict=True) if known_s is not None]
    await asyncio.sleep(0.2)


async def late(cluster: FaultCluster, dice: random.Random, row: Row) -> None:
    """A round is a message that arrives when its session has failed and another has the blocks and the slot.

    One whose session began to wait late enough arrives in time.
    """
    failed_s = {entry["nonce"]: entry["at"] for entry in cluster.journal("failed")}
    row.rounds = sum(failed_s.get(sent["nonce"], sent["at"]) < sent["at"] for sent in cluster.journal("fault"))
    await asyncio.sleep(0.2)


@dataclass
class DividedCluster(FaultCluster):
    """On hosts with a network between them that can be cut."""

    cut: Cut = field(kw_only=True)


@asynccontextmanager
async def on_two_hosts(model: Path, folder: Path) -> AsyncIterator[FaultCluster]:
    """p0 and d0 beside the router, p1 and d1 behind a network that can be cut."""
    with ExitStack() as undo:
        left, right, cut = undo.enter_context(routed_namespaces())
        hosts = {"router": left, "p0": left, "d0": left, "p1": right, "d1": right}
        cluster = DividedCluster(
            model,
            folder,
            **{**SMALL_CLUSTER, "decode": {}},
            cut=cut,
            namespaces={name: host.name for name, host in hosts.items()},
            router={"host": left.address, "control_host": left.address},
            each={
                name: {"host": host.address, "ucx": UcxConfig(transports="tcp", net_devices=host.device)}
                for name, host in hosts.items()
                if name != "router"
            },
        )
        await asyncio.to_thread(cluster.__enter__)
        try:
            yield cluster
        finally:
            cut.mend()
            await asyncio.to_thread(cluster.__exit__)


async def severed(cluster: FaultCluster, dice: random.Random, row: Row) -> None:
    assert isinstance(cluster, DividedCluster)
    at_s = row.fault_now()
    cluster.cut.sever()
    try:
        await asyncio.sleep(dice.uniform(*CUT_S))
    finally:
        cluster.cut.mend()
    await first_failed_s(cluster, row, at_s, cluster.node_names, CUT_KNOWN_S)
    await asyncio.to_thread(cluster.wait_for_nodes, len(cluster.node_names))
    began_s = {entry["nonce"]: entry["at"] for entry in cluster.journal("expected")}
    row.known_s += [it["at"] - max(at_s, began_s[it["nonce"]]) for it in cluster.journal("failed", at_s)]
