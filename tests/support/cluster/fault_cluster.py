"""A cluster of nodes that misbehave, and that can be killed and started again in about a second."""

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from headrace.speculation.config import SpeculationConfig
from headrace.wire.connection_options import CONTROL_SILENCE_S
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.fault_node import FaultyNode
from tests.support.cluster.process import Process
from tests.support.patience import PATIENCE_S

SETTLE_TIMEOUT_S = PATIENCE_S


@dataclass
class FaultCluster(Cluster):
    """`faults` are the fields of every node's `FaultyNode`."""

    faults: dict[str, Any] = field(default_factory=dict)
    each: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Changes to single nodes' configs, by name."""
    speculation: ClassVar[SpeculationConfig] = SpeculationConfig()
    """Of all nodes; a campaign sets it."""
    _num_started: int = 0
    silence_s: float = CONTROL_SILENCE_S

    def start_node(self, name: str) -> Process:
        self._num_started += 1
        config = replace(self.config_of(name), **self.each.get(name, {}))
        config = replace(config, engine=replace(config.engine, speculation=self.speculation))
        faulty = FaultyNode(config, self.journal_of(name), seed=self._num_started, **self.faults)
        self.processes[name] = self._start_process(name, faulty)
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
        return [name for name in self.processes if name not in self.router_names]

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

    def num_drafted(self) -> tuple[int, int]:
        """Tokens that the nodes drafted since they started last, and those of them that were right."""
        counters = [node["counters"] for node in self.nodes().values()]
        drafted, accepted = (sum(int(each[f"{what}_tokens"]) for each in counters) for what in ("drafted", "accepted"))
        return drafted, accepted

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
            if any(entry[key] for key in ("staging", "operations", "nonces")):
                held[f"{name}'s transfers"] = entry
        return held
