"""A cluster of nodes that misbehave, and that can be killed and started again in about a second.

A process that has imported all that a node needs is forked for each (Python's `forkserver`), so that fifty deaths do
not cost fifty imports of torch.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

from tests.support.child import LOG_FORMAT
from tests.support.child import main as serve
from tests.support.cluster import START_TIMEOUT_S, STOP_TIMEOUT_S, Cluster, Process
from tests.support.fault_node import FaultyNode

SETTLE_TIMEOUT_S = 30.0

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.support.fault_node"])


@dataclass
class Forked:
    """Like `tests.support.cluster.Process`."""

    name: str
    process: ForkServerProcess
    log: Path
    ready: dict[str, str]

    @classmethod
    def start(cls, name: str, config: object, folder: Path) -> Self:
        log = folder / f"{name}.{time.monotonic_ns()}.log"
        here, there = _forks.Pipe(duplex=False)
        process = _forks.Process(target=_run, args=(config, log, there))
        process.start()
        there.close()
        try:
            if not here.poll(START_TIMEOUT_S):
                raise EOFError
            ready = json.loads(here.recv())
        except EOFError:
            process.kill()
            process.join()
            raise AssertionError(f"{name} did not start:\n{log.read_text()[-4000:]}") from None
        return cls(name, process, log, ready)

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> None:
        self.process.join(STOP_TIMEOUT_S)

    def stop(self) -> None:
        if self.process.is_alive():
            self.kill(signal.SIGCONT)
            self.process.terminate()
        self.wait()
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError(f"{self.name} did not stop:\n{self.log.read_text()[-4000:]}")


def _run(config: object, log: Path, ready: Connection) -> None:
    """In the new process."""
    errors = log.open("ab", buffering=0)
    os.dup2(errors.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    asyncio.run(serve(config, ready.send))


@dataclass
class FaultCluster(Cluster):
    """`faults` are the fields of every node's `FaultyNode`. Nodes with an `inside` are not forked."""

    faults: dict[str, Any] = field(default_factory=dict)
    each: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Changes to single nodes' configs, by name."""
    _num_started: int = 0

    def start_node(self, name: str) -> Process:
        self._num_started += 1
        config = replace(self.config_of(name), **self.each.get(name, {}))
        faulty = FaultyNode(config, self.journal_of(name), seed=self._num_started, **self.faults)
        is_forked = name not in self.inside
        node: Any = Forked.start(name, faulty, self.folder) if is_forked else self._start_process(name, faulty)
        self.processes[name] = node
        return self.processes[name]

    def journal_of(self, name: str) -> Path:
        return self.folder / f"{name}.journal"

    def journal(self, what: str, since_s: float = 0.0, names: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Entries of all nodes (or of those named), by time."""
        entries = []
        for path in self.folder.glob("*.journal"):
            if not names or path.stem in names:
                lines = path.read_text().splitlines()
                entries += [{"node": path.stem, **json.loads(line)} for line in lines if line.endswith("}")]
        found = [entry for entry in entries if entry["what"] == what and entry["at"] >= since_s]
        return sorted(found, key=lambda entry: entry["at"])

    @property
    def node_names(self) -> list[str]:
        return [name for name in self.processes if name != "router"]

    def arm(self) -> None:
        """From now on the network damages or delays what `faults` say."""
        for name in self.node_names:
            self.processes[name].kill(signal.SIGUSR2)

    def restart(self, name: str) -> None:
        """Until the router knows the new process."""
        before = self.nodes().get(name, {}).get("incarnation")
        self.start_node(name)
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while self.nodes().get(name, {}).get("incarnation") in (None, before):
            assert time.monotonic() < deadline_s, f"{name} did not register again: {self.logs()}"
            time.sleep(0.02)

    def assert_all_is_back(self) -> None:
        """Once nobody asks any more: blocks, slots, staging buffers, operations and nonces of every node."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while held := self._held():
            assert time.monotonic() < deadline_s, f"still held: {held}: {self.logs()}"
            time.sleep(0.1)

    def last_held(self) -> list[dict[str, Any]]:
        """What each node said last that it holds, and what it dropped."""
        return list({entry["node"]: entry for entry in self.journal("held")}.values())

    def _held(self) -> dict[str, Any]:
        asked_s = time.monotonic()
        for name in self.node_names:
            self.processes[name].kill(signal.SIGUSR1)
        held: dict[str, Any] = {}
        for name, node in self.nodes().items():
            counts = (node["blocks"]["in_use"], node["slots"]["in_use"], node["running"], node["waiting"])
            if any(counts):
                held[name] = counts
            for pool in (node["blocks"], node["slots"]):
                assert pool["free"] + pool["cached"] + pool["in_use"] == pool["total"]
        if len(self.nodes()) != len(self.node_names):
            held["nodes"] = sorted(self.nodes())
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while len(said := {entry["node"]: entry for entry in self.journal("held", asked_s)}) < len(self.node_names):
            assert time.monotonic() < deadline_s, f"only {sorted(said)} answered: {self.logs()}"
            time.sleep(0.02)
        for name, entry in said.items():
            if any(entry[key] for key in ("staging", "operations", "routes")):
                held[f"{name}'s transfers"] = entry
        return held
