"""The processes of one run: found by their working directory, and all ended.

Ray starts a tree of processes, some in process groups of their own, and when the supervisor is killed the tree falls
apart: no parent, group or session holds all of them, and a process that sets its title wipes its environment. All of
them inherit the working directory and keep it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from deploy.errors import FolderUnusable

POLL_S = 0.05
KILL_S = 2.0
SAME_START_S = 2.0
"""Two processes compute a third one's start from their own view of the boot time, which clock corrections move."""


def run_folder(run_id: str) -> Path:
    """Temporary files of a run. Short, since Ray's Unix sockets lie in it."""
    return Path("/tmp") / f"headrace-{run_id}"


def working_folder(run_id: str) -> Path:
    """Working directory of a run's processes; a separate folder, since a shell may stand in the run's folder itself."""
    return run_folder(run_id) / "cwd"


def make_folders(run_id: str) -> Path:
    """Makes a new run's folder and the working folder in it, for this user alone; returns the latter.

    Raises FolderUnusable.
    """
    try:
        for folder in (run_folder(run_id), working_folder(run_id)):
            folder.mkdir(mode=0o700)
    except OSError as error:
        parent = run_folder(run_id).parent
        raise FolderUnusable(
            f"{error.filename}: {error.strerror}; Ray's sockets and logs of a run lie there: make {parent} writable, "
            "with room in it"
        ) from None
    return working_folder(run_id)


def processes_of_run(run_id: str) -> list[int]:
    """Live processes that work in the run's folder, other than this one and its parent; zombies do not count."""
    folder, not_these = str(working_folder(run_id)), {os.getpid(), os.getppid()}
    processes = psutil.process_iter(["cwd"])  # None for another user's process
    return [
        each.pid
        for each in processes
        if each.info["cwd"] == folder and each.pid not in not_these and is_alive(each.pid)
    ]


def end_processes_of_run(run_id: str, deadline_s: float) -> list[int]:
    """Waits until the run's processes are gone; what is left at `deadline_s` (monotonic) is killed and returned."""
    killed: set[int] = set()
    while left := processes_of_run(run_id):
        now_s = time.monotonic()
        if now_s >= deadline_s + KILL_S:  # the kernel is still ending them
            break
        if now_s >= deadline_s:
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            killed.update(left)
        time.sleep(POLL_S)
    return sorted(killed)


def is_alive(pid: int, started_s: float | None = None) -> bool:
    """True while `pid` runs; with `started_s`, while it is the process that started then."""
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        return started_s is None or abs(process.create_time() - started_s) < SAME_START_S
    except psutil.NoSuchProcess:
        return False


def started_at_s(pid: int) -> float:
    """Wall-clock time at which `pid` started: with the pid, a process's identity. Raises psutil.NoSuchProcess."""
    return psutil.Process(pid).create_time()


def send_signal(pid: int, number: signal.Signals) -> None:
    """Like os.kill, but a process that is gone already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_gone(pid: int, started_s: float, deadline_s: float) -> bool:
    """Waits for a process's end; False if it still runs at `deadline_s` (monotonic)."""
    while is_alive(pid, started_s):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True
