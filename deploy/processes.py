"""The processes of one run: found by a mark in their environment, and ended for certain.

Ray starts a tree of processes, some in process groups of their own, and a killed supervisor leaves them to init: no
parent, group or session holds all of them. The environment does, since every one inherits it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

RUN_MARK = "HEADRACE_RUN_ID"
"""Environment variable: the id of the run that a process belongs to."""

POLL_S = 0.05


def processes_of_run(run_id: str) -> list[int]:
    """Live processes, other than this one, that were started with this run's mark; zombies do not count."""
    mark = f"{RUN_MARK}={run_id}".encode()
    return [pid for pid in _all_pids() if pid != os.getpid() and mark in _environment(pid) and is_alive(pid)]


def end_processes_of_run(run_id: str, deadline_s: float) -> list[int]:
    """Waits until the run's processes are gone; what is left at `deadline_s` (monotonic) is killed and returned."""
    while left := processes_of_run(run_id):
        if time.monotonic() >= deadline_s:
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            return left
        time.sleep(POLL_S)
    return []


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


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return []


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name, in parentheses, may hold anything
    return fields[0], int(fields[19])
