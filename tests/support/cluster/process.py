"""One Headrace process of a test: started from a config in full, killed or stopped, and gone at the end.

    with_logs = Process.start("d0", NodeConfig(...), folder)
    with_logs.ready["address"]

A process that has imported all that a node needs is forked for each (Python's `forkserver`), so that hundreds of
processes do not cost hundreds of imports of torch. One that must start inside something else, a network namespace
say, is a command and imports for itself.
"""

import asyncio
import base64
import gc
import json
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from headrace.host_process import log_to_stderr
from tests.support.cluster.child import main as serve
from tests.support.patience import PATIENCE_S

START_TIMEOUT_S = PATIENCE_S  # two cores may have to load torch in several processes at once
STOP_TIMEOUT_S = PATIENCE_S

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.support.cluster.fault_node", "router.server"])


@dataclass
class Process(ABC):
    """A child that has said that it serves. `ready` is what it said."""

    name: str
    log: Path
    ready: dict[str, str]

    @staticmethod
    def start(name: str, config: object, folder: Path, *, inside: Sequence[str] = ()) -> "Process":
        """`inside` is put before the command: `ip netns exec NAME`, say."""
        log = folder / f"{name}.{time.monotonic_ns()}.log"
        process = _Command.launch(name, config, log, inside) if inside else _Forked.launch(name, config, log)
        said = process.first_line(time.monotonic() + START_TIMEOUT_S)
        if not said:
            process.kill()
            process.wait()
            raise AssertionError(f"{name} did not start:\n{log.read_text()[-4000:]}")
        process.ready = json.loads(said)
        return process

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @property
    @abstractmethod
    def is_alive(self) -> bool: ...

    @property
    @abstractmethod
    def exit_status(self) -> int | None:
        """None while it runs; of one that a signal ended, its number below zero."""

    @abstractmethod
    def first_line(self, deadline_s: float) -> str:
        """Empty when the process ended, or said nothing in time."""

    @abstractmethod
    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Until it has ended, once it was told to; or until the time is over."""

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


@dataclass
class _Forked(Process):
    child: ForkServerProcess
    said: Connection

    @classmethod
    def launch(cls, name: str, config: object, log: Path) -> "_Forked":
        said, say = _forks.Pipe(duplex=False)
        child = _forks.Process(target=_serve, args=(config, log, say))
        child.start()
        say.close()
        return cls(name, log, {}, child, said)

    @property
    def pid(self) -> int:
        assert self.child.pid is not None
        return self.child.pid

    @property
    def is_alive(self) -> bool:
        return self.child.is_alive()

    @property
    def exit_status(self) -> int | None:
        return self.child.exitcode

    def first_line(self, deadline_s: float) -> str:
        with self.said:
            try:
                return self.said.recv() if self.said.poll(deadline_s - time.monotonic()) else ""
            except EOFError:
                return ""

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        self.child.join(timeout_s)


def _serve(config: object, log: Path, say: Connection) -> None:
    """In the new process."""
    gc.freeze()  # what the fork server imported would delay full collections, and garbage would look like a leak
    errors = log.open("ab", buffering=0)
    os.dup2(errors.fileno(), 2)
    log_to_stderr()
    asyncio.run(serve(config, say.send))


@dataclass
class _Command(Process):
    child: subprocess.Popen[bytes]

    @classmethod
    def launch(cls, name: str, config: object, log: Path, inside: Sequence[str]) -> "_Command":
        argument = base64.b64encode(pickle.dumps(config)).decode()
        with log.open("wb") as errors:
            command = [*inside, sys.executable, "-m", "tests.support.cluster.child", argument]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        return cls(name, log, {}, child)

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_alive(self) -> bool:
        return self.child.poll() is None

    @property
    def exit_status(self) -> int | None:
        return self.child.poll()

    def first_line(self, deadline_s: float) -> str:
        assert self.child.stdout is not None
        with self.child.stdout as said:
            while time.monotonic() < deadline_s:
                if select.select([said], [], [], 0.5)[0]:
                    return said.readline().decode()
                if not self.is_alive:
                    break
            return ""

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        try:
            self.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return
