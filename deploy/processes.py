"""The processes of one run: found by their working directory, and ended for certain.

Ray starts a tree of processes, some in process groups of their own, and when the supervisor is killed the tree falls
apart: no parent, group or session holds all of them, and a process that sets its title wipes its environment. The
working directory is inherited by all of them and stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

POLL_S = 0.05
KILL_S = 2.0


def run_folder(run_id: str) -> Path:
    """Temporary files of a run. Short, since Ray's Unix sockets lie in it."""
    return Path("/tmp") / f"headrace-{run_id}"


def working_folder(run_id: str) -> Path:
    """Where a run's processes work; a folder of its own, so that nobody who looks at the run's files is in it."""
    return run_folder(run_id) / "cwd"


def make_folders(run_id: str) -> Path:
    """Makes a new run's folder and the working folder in it, for this user alone; returns the latter."""
    for folder in (run_folder(run_id), working_folder(run_id)):
        folder.mkdir(mode=0o700)
    return working_folder(run_id)


def processes_of_run(run_id: str) -> list[int]:
    """Live processes that work in the run's folder, other than this one and its parent; zombies do not count."""
    folder, not_these = str(working_folder(run_id)), {os.getpid(), os.getppid()}
    return [pid for pid in _all_pids() if pid not in not_these and _working_directory(pid) == folder and is_alive(pid)]


def end_processes_of_run(run_id: str, deadline_s: float) -> list[int]:
    """Waits until the run's processes are gone; what is left at `deadline_s` (monotonic) is killed and returned."""
    killed: set[int] = set()
    while left := processes_of_run(run_id):
        now_s = time.monotonic()
        if now_s >= deadline_s + KILL_S:  # in the kernel's hands
            break
        if now_s >= deadline_s:
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            killed.update(left)
        time.sleep(POLL_S)
    return sorted(killed)


def is_alive(pid: int, start_ticks: int | None = None) -> bool:
    """Whether `pid` runs; with `start_ticks`, whether it is still the process that started then."""
    state_and_start = _state_and_start(pid)
    if state_and_start is None or state_and_start[0] in "ZX":
        return False
    return start_ticks is None or state_and_start[1] == start_ticks


def start_ticks(pid: int) -> int:
    """When `pid` started, in clock ticks since boot: with the pid, a process's identity."""
    state_and_start = _state_and_start(pid)
    if state_and_start is None:
        raise ProcessLookupError(pid)
    return state_and_start[1]


def send_signal(pid: int, number: signal.Signals) -> None:
    """As os.kill; a process that is gone already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_gone(pid: int, ticks: int, deadline_s: float) -> bool:
    """Whether the process ended before `deadline_s` (monotonic)."""
    while is_alive(pid, ticks):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _working_directory(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)")
    except OSError:  # gone, or another user's
        return None


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name, in parentheses, may hold anything
    return fields[0], int(fields[19])
