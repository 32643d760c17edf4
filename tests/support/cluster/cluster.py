"""A real cluster for a test: one process for each router and each node, talking over loopback."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import httpx

from decode_node.config import LocalPrefillConfig
from headrace.engine.config import EngineConfig
from node.config import NodeConfig
from router.config import RouterConfig
from tests.support.cluster.process import Process
from tests.support.patience import PATIENCE_S

SMALL = EngineConfig(cache_bytes=64 << 20, max_step_tokens=256, max_running=16, threads=1)
ALWAYS_REMOTE = LocalPrefillConfig(max_tokens=0)
SHORT_SILENCE_S = 4.0
"""For tests of what stops without a word: longer than a busy machine's pauses, shorter than gRPC's own minute."""


@dataclass
class Cluster:
    """`with Cluster(model, folder) as cluster:` yields when every node is registered.

    num_routers               the first is `router` at `url`, the next ones `router1` and so on, at `urls`
    prefill, decode, both     changes to the defaults of the nodes that start in each role
    router                    changes to the defaults of the routers
    namespaces                network namespaces of processes, by their names; this process's own for all others
    silence_s                 `control_silence_s` of all: by default no pause of a busy machine breaks a connection;
                              tests of what stops without a word say SHORT_SILENCE_S
    """

    model: Path
    folder: Path
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    num_routers: int = 1
    engine: EngineConfig = SMALL
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
    namespaces: dict[str, str] = field(default_factory=dict)
    silence_s: float = PATIENCE_S

    def __enter__(self) -> Self:
        self.processes: dict[str, Process] = {}
        with ExitStack() as undo:
            undo.callback(self._stop)
            settings: dict[str, Any] = {
                "model_path": self.model,
                "port": 0,
                "control_port": 0,
                "heartbeat_s": 1.0,
                "control_silence_s": self.silence_s,
                # Most tests are about what nodes do with a request: it goes where the test can foresee.
                "roles": "fixed",
                "policy": "round_robin",
            }
            self._router_config = RouterConfig(**settings | self.router)
            self.router_names = ["router", *(f"router{index}" for index in range(1, self.num_routers))]
            for name in self.router_names:
                self.processes[name] = self._start_process(name, self._router_config)
            self.urls = [self.processes[name].ready["url"] for name in self.router_names]
            self.url = self.urls[0]
            for index in range(self.num_prefill):
                self.start_node(f"p{index}")
            for index in range(self.num_decode):
                self.start_node(f"d{index}")
            for index in range(self.num_both):
                self.start_node(f"n{index}")
            self.wait_for_nodes(self.num_prefill + self.num_decode + self.num_both)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def start_node(self, name: str) -> Process:
        """Starts p<i>, d<i> or n<i>; again under the same name after it was killed."""
        self.processes[name] = self._start_process(name, self.config_of(name))
        return self.processes[name]

    def restart_router(self, name: str = "router") -> Process:
        """Starts a router that was killed again, where clients and nodes look for it."""
        ready = self.processes[name].ready
        port, control_port = (int(ready[key].rpartition(":")[2]) for key in ("url", "control_address"))
        config = replace(self._router_config, port=port, control_port=control_port)
        self.processes[name] = self._start_process(name, config)
        return self.processes[name]

    def _start_process(self, name: str, config: object) -> Process:
        return Process.start(name, config, self.folder, namespace=self.namespaces.get(name))

    def config_of(self, name: str) -> NodeConfig:
        common: dict[str, Any] = {
            "name": name,
            "model_path": str(self.model),
            "router_addresses": tuple(self.processes[name].ready["control_address"] for name in self.router_names),
            "engine": self.engine,
            "control_silence_s": self.silence_s,
        }
        if name.startswith("p"):
            return NodeConfig(**common | {"role": "prefill"} | self.prefill)
        if name.startswith("d"):
            return NodeConfig(**common | {"role": "decode", "local_prefill": ALWAYS_REMOTE} | self.decode)
        return NodeConfig(**common | {"role": "both"} | self.both)

    def nodes(self, url: str | None = None) -> dict[str, Any]:
        """The live nodes of a router's /cluster, by name; of the first router by default."""
        # verify=False: no https here, and httpx would take 30 ms to load the world's authorities.
        reply = httpx.get(f"{url or self.url}/cluster", timeout=PATIENCE_S, verify=False).json()
        return {node["name"]: node for node in reply["nodes"]}

    def wait_for_nodes(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Returns once every router knows so many nodes."""
        deadline_s = time.monotonic() + timeout_s
        for url in self.urls:
            while len(known := self.nodes(url)) != count:
                assert time.monotonic() < deadline_s, f"{len(known)} nodes registered, not {count}: {self.logs()}"
                time.sleep(0.05)

    def idle_nodes(self, names: Sequence[str], url: str | None = None) -> dict[str, Any]:
        """Statuses of these nodes once all report, in one snapshot, that no request holds or awaits anything."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            nodes = self.nodes(url)
            held = {
                name: (node["blocks"]["in_use"], node["slots"]["in_use"], node["running"], node["waiting"])
                for name, node in sorted(nodes.items())
            }
            if held == dict.fromkeys(names, (0, 0, 0, 0)):
                return nodes
            assert time.monotonic() < deadline_s, f"blocks, slots, running, waiting: {held} after {PATIENCE_S:.0f} s"
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.log.read_text()[-2000:]}" for p in self.processes.values())

    def _stop(self) -> None:
        with ExitStack() as all_of_them:
            for process in self.processes.values():
                all_of_them.callback(process.stop)


def with_engine(**changes: Any) -> EngineConfig:
    return replace(SMALL, **changes)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)
