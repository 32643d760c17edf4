"""What may happen to a cluster while it hands over, again and again, under load; and what came of it.

    row = await run("prefill node killed", model, folder, rounds=50)

Every answer is compared with the undisturbed cluster's: it is the same, or an error, or wrong. Afterwards everything
that requests held must be back on all nodes.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cluster.cluster import with_engine
from tests.support.cluster.fault_cluster import FaultCluster
from tests.support.cluster.netns import Cut, routed_namespaces
from tests.support.cluster.recall_load import RecallLoad
from transfer.ucx import UcxConfig

NUM_CLIENTS = 4
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


@dataclass
class Row:
    """rounds       faults that met a session; missed: those that met none, and were repeated
    dropped      parts that came when nobody expected them any more
    known_s      from the fault until a survivor's session had failed: a round's first; each one of a killed node; each
                 one of a cut network, from its own beginning if that was behind the cut
    sessions_failed   on all nodes, by cause: each of them was repaired, or its client got an error
    """

    name: str
    rounds: int = 0
    missed: int = 0
    right: int = 0
    migrated: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    dropped: int = 0
    sessions_failed: dict[str, int] = field(default_factory=dict)
    known_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __add__(self, other: "Row") -> "Row":
        """The same fault with another model."""
        return Row(
            self.name,
            self.rounds + other.rounds,
            self.missed + other.missed,
            self.right + other.right,
            self.migrated + other.migrated,
            dict(Counter(self.errors) + Counter(other.errors)),
            self.wrong + other.wrong,
            self.dropped + other.dropped,
            dict(Counter(self.sessions_failed) + Counter(other.sessions_failed)),
            self.known_s + other.known_s,
            self.seconds + other.seconds,
        )

    @property
    def slowest_s(self) -> float | None:
        return max(self.known_s, default=None)

    def percentile(self, share: float) -> float | None:
        if not self.known_s:
            return None
        return sorted(self.known_s)[min(len(self.known_s) - 1, int(share * len(self.known_s)))]


Round = Callable[[FaultCluster, random.Random, Row], Awaitable[None]]
"""Commits one fault, sees what comes of it, and undoes it."""


@dataclass(frozen=True)
class Scenario:
    cluster: Callable[[Path, Path], AbstractAsyncContextManager[FaultCluster]]
    round: Round


async def run(name: str, model: Path, folder: Path, *, rounds: int, seed: int = 0) -> Row:
    """Raises AssertionError when something that requests held did not come back. `wrong` is the caller's to judge."""
    began_s = time.monotonic()
    row, dice = Row(name), random.Random(f"{name} {seed}")
    scenario = SCENARIOS[name]
    async with scenario.cluster(model, folder) as cluster:
        load = await RecallLoad.against(cluster.url, model, seed)
        faults_began_s = time.monotonic()
        cluster.arm()
        async with load.running(NUM_CLIENTS):
            while row.rounds < rounds:
                assert row.missed < 3 * rounds + 10, f"{row.missed} faults met no session: {cluster.logs()}"
                await asyncio.sleep(dice.uniform(0.0, 0.3))
                await scenario.round(cluster, dice, row)
                await load.answered(2 * NUM_CLIENTS)  # one fault after the other: no request need meet several
        row.right, row.migrated = load.num_right, load.num_migrated
        row.errors, row.wrong = dict(load.errors), load.wrong
        for entry in cluster.journal("failed", faults_began_s):
            row.sessions_failed[entry["cause"]] = row.sessions_failed.get(entry["cause"], 0) + 1
        await asyncio.to_thread(cluster.assert_all_is_back)
        row.dropped = sum(entry["dropped"] for entry in cluster.last_held())
    row.seconds = time.monotonic() - began_s
    return row


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
        at_s = time.monotonic()
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
        at_s = time.monotonic()
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
    """A round is a message that arrives when its session has failed and another has the blocks and the slot."""
    row.rounds = len(cluster.journal("fault"))
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
            inside={name: host.enter for name, host in hosts.items()},
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
    at_s = time.monotonic()
    cluster.cut.sever()
    try:
        await asyncio.sleep(dice.uniform(*CUT_S))
    finally:
        cluster.cut.mend()
    await first_failed_s(cluster, row, at_s, cluster.node_names, CUT_KNOWN_S)
    await asyncio.to_thread(cluster.wait_for_nodes, len(cluster.node_names))
    began_s = {entry["nonce"]: entry["at"] for entry in cluster.journal("expected")}
    row.known_s += [it["at"] - max(at_s, began_s[it["nonce"]]) for it in cluster.journal("failed", at_s)]


SCENARIOS = {
    "prefill node killed": Scenario(with_faults(), killed("p")),
    "decode node killed": Scenario(with_faults(), killed("d")),
    "prefill node stopped": Scenario(with_faults(), stopped("p")),
    "decode node stopped": Scenario(with_faults(), stopped("d")),
    "bit flipped": Scenario(with_faults(flip_share=0.02), damaged),
    "link cut and restored": Scenario(on_two_hosts, severed),
    "message late": Scenario(with_faults(late_share=0.03, late_s=LATE_S), late),
}


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'fault':<23}{'rounds':>7}{'missed':>7}{'right':>7}{'moved':>6}{'errors':>7}{'wrong':>6}{'dropped':>8}"
        f"{'p50 ms':>8}{'p95 ms':>8}{'max ms':>8}{'s':>6}  sessions that failed"
    ]
    for row in rows:
        counts = f"{row.rounds:>7}{row.missed:>7}{row.right:>7}{row.migrated:>6}{sum(row.errors.values()):>7}"
        times = (row.percentile(0.5), row.percentile(0.95), row.slowest_s)
        known = "".join(f"{'' if time_s is None else format(time_s * 1e3, '.0f'):>8}" for time_s in times)
        failed = ", ".join(f"{count} {cause}" for cause, count in sorted(row.sessions_failed.items()))
        lines.append(f"{row.name:<23}{counts}{len(row.wrong):>6}{row.dropped:>8}{known}{row.seconds:>6.0f}  {failed}")
    return "\n".join(lines)
