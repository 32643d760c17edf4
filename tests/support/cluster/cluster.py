"""A real cluster for a test: one process for the router and each node, talking over loopback."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import httpx

from decode_node.config import DecodeNodeConfig, LocalPrefillConfig
from headrace.engine.config import EngineConfig
from prefill_node.config import PrefillNodeConfig
from router.config import RouterConfig
from tests.support.cluster.process import Process
from tests.support.patience import PATIENCE_S

SMALL = EngineConfig(cache_bytes=64 << 20, max_step_tokens=256, max_running=16, threads=1)
ALWAYS_REMOTE = LocalPrefillConfig(max_tokens=0)


@dataclass
class Cluster:
    """`with Cluster(model, folder) as cluster:` yields when every node is registered.

    prefill, decode, router   changes to the defaults of each kind's config
    inside                    what is put before a process's command, by its name: `ip netns exec NAME`, say
    """

    model: Path
    folder: Path
    num_prefill: int = 1
    num_decode: int = 1
    engine: EngineConfig = SMALL
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
    inside: dict[str, Sequence[str]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.processes: dict[str, Process] = {}
        with ExitStack() as undo:
            undo.callback(self._stop)
            settings: dict[str, Any] = {"model_path": self.model, "port": 0, "control_port": 0, "heartbeat_s": 1.0}
            config = RouterConfig(**settings | self.router)
            self.processes["router"] = self._start_process("router", config)
            self.url = self.processes["router"].ready["url"]
            for index in range(self.num_prefill):
                self.start_node(f"p{index}")
            for index in range(self.num_decode):
                self.start_node(f"d{index}")
            self.wait_for_nodes(self.num_prefill + self.num_decode)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def start_node(self, name: str) -> Process:
        """Starts p<i> or d<i>; again under the same name after it was killed."""
        self.processes[name] = self._start_process(name, self.config_of(name))
        return self.processes[name]

    def _start_process(self, name: str, config: object) -> Process:
        return Process.start(name, config, self.folder, inside=self.inside.get(name, ()))

    def config_of(self, name: str) -> PrefillNodeConfig | DecodeNodeConfig:
        common: dict[str, Any] = {
            "name": name,
            "model_path": str(self.model),
            "router_address": self.processes["router"].ready["control_address"],
            "engine": self.engine,
        }
        if name.startswith("p"):
            return PrefillNodeConfig(**common | self.prefill)
        return DecodeNodeConfig(**common | {"local_prefill": ALWAYS_REMOTE} | self.decode)

    def nodes(self) -> dict[str, Any]:
        """The live nodes of /cluster, by name."""
        reply = httpx.get(f"{self.url}/cluster", timeout=PATIENCE_S).json()
        return {node["name"]: node for node in reply["nodes"]}

    def wait_for_nodes(self, count: int, timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while len(self.nodes()) != count:
            assert time.monotonic() < deadline_s, f"{len(self.nodes())} nodes registered, not {count}: {self.logs()}"
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.log.read_text()[-2000:]}" for p in self.processes.values())

    def _stop(self) -> None:
        with ExitStack() as all_of_them:
            for process in self.processes.values():
                all_of_them.callback(process.stop)


def with_engine(**changes: Any) -> EngineConfig:
    return replace(SMALL, **changes)
