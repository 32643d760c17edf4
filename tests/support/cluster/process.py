"""One Headrace process of a test: started from a config in full, killed or stopped, and gone at the end.

    with_logs = Process.start("d0", NodeConfig(...), folder)
    with_logs.ready["address"]

A process that has imported all that a node needs is forked for each (Python's `forkserver`), so that hundreds of
processes do not cost hundreds of imports of torch, of seven seconds of a processor each. One on another host moves into
its network namespace first.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from headrace.host_process import log_to_stderr
from tests.support.cluster import netns
from tests.support.cluster.child import main as serve
from tests.support.patience import PATIENCE_S

START_TIMEOUT_S = PATIENCE_S  # two cores may have to load torch in several processes at once
STOP_TIMEOUT_S = PATIENCE_S

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.support.cluster.fault_node", "router.server"])


@dataclass
class Process:
    """A child that has said that it serves. `ready` is what it said."""

    name: str
    log: Path
    child: ForkServerProcess
    ready: dict[str, str]

    @classmethod
    def start(cls, name: str, config: object, folder: Path, *, namespace: str | None = None) -> "Process":
        """`namespace` is the network namespace in which it runs, if not this process's own."""
        log = folder / f"{name}.{time.monotonic_ns()}.log"
        said, say = _forks.Pipe(duplex=False)
        child = _forks.Process(target=_serve, args=(config, log, say, namespace))
        child.start()
        say.close()
        process = cls(name, log, child, {})
        if not (line := _first_line(said)):
            process.kill()
            process.wait()
            raise AssertionError(f"{name} did not start:\n{log.read_text()[-4000:]}")
        process.ready = json.loads(line)
        return process

    @property
    def pid(self) -> int:
        assert self.child.pid is not None
        return self.child.pid

    @property
    def is_alive(self) -> bool:
        return self.child.is_alive()

    @property
    def exit_status(self) -> int | None:
        """None while it runs; of one that a signal ended, its number below zero."""
        return self.child.exitcode

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Until it has ended, once it was told to; or until the time is over."""
        self.child.join(timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.is_alive:
            os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGTERM; it must end by itself, also when it was stopped before."""
        self.kill(signal.SIGCONT)
        self.kill(signal.SIGTERM)
        self.wait()
        if self.is_alive:
            self.kill()
            self.wait()
            raise AssertionError(f"{self.name} did not stop:\n{self.log.read_text()[-4000:]}")


def _first_line(said: Connection) -> str:
    """Empty when the process ended, or said nothing in time."""
    with said:
        try:
            return said.recv() if said.poll(START_TIMEOUT_S) else ""
        except EOFError:
            return ""


def _serve(config: object, log: Path, say: Connection, namespace: str | None) -> None:
    """In the new process."""
    gc.freeze()  # what the fork server imported would delay full collections, and garbage would look like a leak
    errors = log.open("ab", buffering=0)
    os.dup2(errors.fileno(), 2)
    log_to_stderr()
    if namespace is not None:
        netns.enter(namespace)
    asyncio.run(serve(config, say.send))
