"""A cluster as its own command lines start it: router and nodes, one process each, without Ray.

    with Processes(folder, model, {"p0": ("prefill", {...}), "d0": ("decode", {...})}) as cluster:
        cluster.wait_ready(deadline_s)      # every node registered
        cluster.url

All processes start at once, each with a YAML file and a log in `folder`; leaving the block ends them, killing those
that do not end by themselves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import yaml

from deploy.ports import free_ports

REPOSITORY = Path(__file__).parents[2]
STOP_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 2.0
POLL_S = 0.02

NodeSettings = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Each node's name: its role (`prefill`, `decode` or `both`) and the settings of `node` in a cluster file."""


def prefill_and_decode(engine: Mapping[str, Any], prefill: Mapping[str, Any] | None = None) -> NodeSettings:
    """One node of each role; the decode node never prefills. `prefill` holds settings of the prefill node alone."""
    return {
        "p0": ("prefill", {"engine": engine, **(prefill or {})}),
        "d0": ("decode", {"engine": engine, "local_prefill": {"max_tokens": 0}}),
    }


class ClusterFailed(RuntimeError):
    """A process ended, or was not ready in time; the message has the end of its log."""


@dataclass(frozen=True)
class _Child:
    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    def log_end(self) -> str:
        return f"--- {self.name}, exit status {self.popen.poll()}\n{self.log.read_text(errors='replace')[-3000:]}"


class Processes:
    """A router and its nodes. `url` is the router's; `started_s` (perf_counter) precedes the first process.

    node_module   runs a node of `python -m node`'s settings
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        nodes: NodeSettings,
        *,
        router: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        node_module: str = "node",
    ) -> None:
        self._folder = folder
        self._model = str(model.resolve())
        self._nodes = nodes
        self._router = router or {}
        self._node_module = node_module
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self._children: list[_Child] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        port, control_port = free_ports("127.0.0.1", "127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        router = {"model_path": self._model, "port": port, "control_port": control_port, **self._router}
        self.started_s = time.perf_counter()
        try:
            self._start("router", "router", router)
            for name, (role, settings) in self._nodes.items():
                derived = {"name": name, "model_path": self._model, "router_addresses": [f"127.0.0.1:{control_port}"]}
                self._start(name, self._node_module, {**settings, **derived, "role": role})
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def wait_ready(self, deadline_s: float) -> None:
        """Returns once the router knows every node; raises ClusterFailed by `deadline_s` (perf_counter)."""
        while self._num_registered() < len(self._nodes):
            for child in self._children:
                if child.popen.poll() is not None:
                    raise ClusterFailed(f"{child.name} did not start:\n{child.log_end()}")
            if time.perf_counter() > deadline_s:
                logs = "\n".join(child.log_end() for child in self._children)
                raise ClusterFailed(f"{self._num_registered()} of {len(self._nodes)} nodes in time:\n{logs}")
            time.sleep(POLL_S)

    def cluster(self) -> dict[str, Any]:
        """The router's report of its nodes and their links."""
        with urllib.request.urlopen(f"{self.url}/cluster", timeout=LOOK_TIMEOUT_S) as reply:
            report: dict[str, Any] = json.load(reply)
            return report

    def _num_registered(self) -> int:
        try:
            return len(self.cluster()["nodes"])
        except OSError:  # the router does not listen yet
            return 0

    def _start(self, name: str, module: str, settings: Mapping[str, Any]) -> None:
        file, log = self._folder / f"{name}.yaml", self._folder / f"{name}.log"
        file.write_text(yaml.safe_dump(dict(settings)))
        with log.open("wb") as out:
            popen = subprocess.Popen(
                [sys.executable, "-m", module, "-c", str(file)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=REPOSITORY,
            )
        self._children.append(_Child(name, popen, log))

    def terminate(self) -> None:
        """Tells all processes to end, and waits for none: leaving the block does."""
        for child in self._children:
            if child.popen.poll() is None:
                child.popen.terminate()

    def _end(self) -> None:
        self.terminate()
        deadline_s = time.perf_counter() + STOP_TIMEOUT_S
        for child in self._children:
            try:
                child.popen.wait(max(0.1, deadline_s - time.perf_counter()))
            except subprocess.TimeoutExpired:
                print(f"{child.name} had to be killed", flush=True)
                child.popen.kill()
                _await_killed(child)


def _await_killed(child: _Child) -> None:
    """Waits for a killed process as long as a driver may hold it."""
    try:
        child.popen.wait(KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"{child.name}, process {child.popen.pid}, is killed and does not end: it is left behind", flush=True)


def end_on_sigterm() -> None:
    """Turns SIGTERM into SystemExit, so that a benchmark that is ended ends its processes, too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
