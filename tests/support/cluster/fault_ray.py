"""Faults of a cluster that Ray runs: nodes that are asked to stop, and raylets that die with all that they host."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from deploy.ports import free_ports
from deploy.ray_session import OBJECT_STORE_BYTES
from tests.support.cluster.fault_row import HostDeath, Row
from tests.support.cluster.shell import END_S, START_S, Shell, is_listening, nodes_of, output_of, until
from tests.support.cluster.usage import settled

NODES = ("p0", "d0", "p1", "d1")
RAYLETS_START_S = 180.0
SOON_NOTICED = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
"""Ray's own settings let 13 s go by until it starts a dead raylet's actors elsewhere: most of a round."""
NUM_RAYLETS = 3
"""With room for two nodes each: whichever dies, its nodes find another that has room."""


@dataclass
class RayFaultCluster:
    """A cluster of `headrace up`, as a campaign sees it: no journal, since its nodes are the product's own."""

    shell: Shell
    url: str
    raylets: list[subprocess.Popen[str]] = field(default_factory=list)
    head_address: str = ""

    def arm(self) -> None:
        pass

    def journal(self, what: str, since_s: float = 0.0) -> list[dict[str, Any]]:
        return []

    def num_drafted(self) -> tuple[int, int]:
        return 0, 0  # `headrace up` starts its nodes by its own file, which asks for no drafts

    def last_held(self) -> list[dict[str, Any]]:
        return []

    def logs(self) -> str:
        return str(self.shell.log())[-4000:]

    def assert_all_is_back(self) -> None:
        assert set(nodes_of(self.url)) == set(NODES)
        assert settled(self.url) == {}

    def wait_for_others(self, before: dict[str, Any]) -> None:
        """Until each of the nodes in `before` is known, with another incarnation than then."""

        def are_back() -> bool:
            now = nodes_of(self.url)
            return all(now.get(name, node)["incarnation"] != node["incarnation"] for name, node in before.items())

        until(are_back, RAYLETS_START_S, f"{sorted(before)} are back: {self.logs()}")

    def start_raylet(self) -> None:
        """Returns when it has its sockets: two that start at once on one host choose the same names for them."""
        options = ["--address", self.head_address, "--block", "--num-cpus", 4, "--disable-usage-stats"]
        options += ["--resources", '{"node_host": 2}', "--dashboard-agent-listen-port", 0]
        options += ["--object-store-memory", OBJECT_STORE_BYTES]
        sockets = self.shell.ray_folder / "session_latest" / "sockets"
        num_sockets = len(list(sockets.iterdir()))
        self.raylets.append(self.shell.start("start", *options, module="ray.scripts.scripts"))
        until(lambda: len(list(sockets.iterdir())) >= num_sockets + 2, START_S, "the raylet has its two sockets")

    def kill_raylet(self, process: psutil.Process) -> None:
        """With the command that started it, and everything else below that; its workers notice that it is gone."""
        process.kill()
        command = next(it for it in self.raylets if psutil.Process(it.pid) in process.parents())
        self.raylets.remove(command)
        output_of(command)


@asynccontextmanager
async def of_headrace_up(model: Path, folder: Path) -> AsyncIterator[RayFaultCluster]:
    shell = Shell(folder)
    try:
        url = await asyncio.to_thread(shell.up, "--prefill", 2, "--decode", 2)
        yield RayFaultCluster(shell, url)
        status, output = await asyncio.to_thread(partial(shell.run, "down", timeout_s=END_S))
        assert status == 0, output
        assert not shell.processes()
    finally:
        shell.kill_everything()


@asynccontextmanager
async def on_raylets(model: Path, folder: Path) -> AsyncIterator[RayFaultCluster]:
    """The router beside Ray's head, the nodes on raylets of their own; all on this host."""
    shell = Shell(folder)
    try:
        (port,) = free_ports("127.0.0.1")
        options = ["--head", "--block", "--port", port, "--num-cpus", 1, "--include-dashboard", "false"]
        options += ["--disable-usage-stats", "--temp-dir", shell.ray_folder]
        options += ["--object-store-memory", OBJECT_STORE_BYTES]
        token = folder / "token"
        token.write_text("of this campaign")
        shell.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), **SOON_NOTICED}
        head = shell.start("start", *options, module="ray.scripts.scripts")
        await asyncio.to_thread(until, partial(is_listening, port), START_S, "Ray listens")
        file = folder / "cluster.yaml"
        role = "{count: 2, placement: {resources: {node_host: 1}, strategy: spread}}"
        waits = f"{{join_timeout_s: {RAYLETS_START_S}, start_timeout_s: {RAYLETS_START_S}}}"
        file.write_text(f"model: {model}\nrouter: {{port: 0}}\nray: {waits}\nprefill: {role}\ndecode: {role}\n")
        address = f"127.0.0.1:{port}"
        cluster = RayFaultCluster(shell, "", head_address=address)
        # The supervisor connects to the only raylet that there is, the head's: the others will die.
        up = partial(shell.run, "up", "-c", file, "--address", address, "--detach", timeout_s=2 * RAYLETS_START_S)
        starting = asyncio.create_task(asyncio.to_thread(up))
        await asyncio.to_thread(until, shell.actors, START_S, "the router has started")
        for _ in range(NUM_RAYLETS):
            await asyncio.to_thread(cluster.start_raylet)
        status, output = await starting
        assert status == 0, output
        cluster.url = shell.record()["urls"][0]
        yield cluster
        status, output = await asyncio.to_thread(partial(shell.run, "down", timeout_s=END_S))
        assert status == 0, output
        head.terminate()
        await asyncio.to_thread(head.communicate)
    finally:
        shell.kill_everything()
        await asyncio.to_thread(until, lambda: not shell.processes(), END_S, "Ray is gone")
        shutil.rmtree(shell.ray_folder, ignore_errors=True)


async def stopped_in_turn(cluster: RayFaultCluster, dice: random.Random, row: Row) -> None:
    """SIGTERM to a node's process, which Ray starts again."""
    name = NODES[row.rounds % len(NODES)]
    node = nodes_of(cluster.url)[name]
    row.fault_now()
    os.kill(node["pid"], signal.SIGTERM)
    await asyncio.to_thread(cluster.wait_for_others, {name: node})
    row.rounds += 1


async def raylet_killed(cluster: RayFaultCluster, dice: random.Random, row: Row) -> None:
    """One that hosts a node; another raylet takes the place of the dead one when its nodes are back."""
    nodes = nodes_of(cluster.url)
    raylet = psutil.Process(nodes[dice.choice(NODES)]["pid"]).parent()
    hosted = {name: node for name, node in nodes.items() if psutil.Process(node["pid"]).parent() == raylet}
    began_s = row.fault_now()
    await asyncio.to_thread(cluster.kill_raylet, raylet)
    await asyncio.to_thread(cluster.wait_for_others, hosted)
    row.host_deaths.append(HostDeath(began_s, time.monotonic()))
    await asyncio.to_thread(cluster.start_raylet)
    row.rounds += 1
