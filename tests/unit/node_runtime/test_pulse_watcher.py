"""A process in which no thread can run Python is ended from outside. Each test has one of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node_runtime.pulse_watcher import is_stopped
from tests.support.patience import PATIENCE_S

LIMIT_S = 2.0  # more than a busy machine lets a thread wait
WATCHED = f"""
import ctypes, os, sys, threading, time
from node_runtime.pulse import Pulse
pulse = Pulse("d0", {LIMIT_S})
def beat():
    while True:
        pulse.beat()
        time.sleep(0.05)
threading.Thread(target=beat, daemon=True).start()
print(pulse.watcher_pid, flush=True)
def hang_with_the_gil():
    ctypes.PyDLL(None).pause()
sys.stdin.readline() and hang_with_the_gil()
pulse.close()
"""


class Watched:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WATCHED],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        self.watcher_pid = int(self.process.stdout.readline())

    def hang(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("now\n")
        self.process.stdin.flush()

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.process.kill()
    watched.process.wait()
    assert watched.process.stdin is not None and watched.process.stdout is not None
    watched.process.stdin.close()
    watched.process.stdout.close()
    until(lambda: is_gone(watched.watcher_pid), "the watcher outlives its process")


def until(is_true: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """True for a process that has ended, whether or not somebody has asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True


def ignores(pid: int, number: signal.Signals) -> bool:
    (ignored,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    return bool(int(ignored.split()[1], 16) >> (number - 1) & 1)


def test_a_process_whose_thread_keeps_the_gil_ends_and_shows_where_it_hangs(watched: Watched) -> None:
    watched.hang()
    assert watched.wait() == -signal.SIGABRT
    log = watched.log.read_text()
    assert "d0: no thread has run Python for 2." in log and f"process {watched.process.pid} is ended" in log
    assert "in hang_with_the_gil" in log


def test_the_time_in_which_a_process_is_stopped_does_not_count(watched: Watched) -> None:
    watched.process.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        watched.process.wait(1.2 * LIMIT_S)
    assert is_stopped(watched.process.pid)
    watched.process.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        watched.process.wait(LIMIT_S / 4)
    assert not is_stopped(watched.process.pid)


def test_a_watcher_outlives_signals_to_its_group_and_ends_with_its_process(watched: Watched) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        until(lambda: ignores(watched.watcher_pid, number), "the watcher is started")  # noqa: B023
    watched.process.kill()
    watched.wait()
    until(lambda: is_gone(watched.watcher_pid), "the watcher outlives its process")


def test_a_process_goes_on_without_its_watcher(watched: Watched) -> None:
    os.kill(watched.watcher_pid, signal.SIGKILL)
    until(lambda: "its pulse watcher has ended" in watched.log.read_text(), "it says so")
    assert watched.process.poll() is None
