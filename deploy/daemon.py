"""`headrace up --detach` and `headrace down`: a supervisor in the background."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.errors import NotRunning, StartFailed
from deploy.processes import POLL_S, end_processes_of_run, send_signal, wait_gone
from deploy.runs import RunDirectory, RunRecord

STOP_MARGIN_S = 25.0
"""A stopping supervisor needs less than this, beyond its nodes' `stop_timeout_s`, to stop Ray and sweep processes."""
LOG_TAIL_LINES = 15


def start_detached(
    arguments: Sequence[str], name: str, runs: RunDirectory, *, start_timeout_s: float, stop_timeout_s: float
) -> RunRecord:
    """Runs `headrace ARGUMENTS` in a new session; returns once its cluster `name` is ready.

    Raises AlreadyRunning, and StartFailed with the end of the log. The supervisor is stopped on failure and on Ctrl-C.
    """
    runs.require_free(name)  # before the log is emptied
    with runs.open_log(name) as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "deploy", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    log = runs.log_path(name)
    try:
        return _await_ready(supervisor, name, runs, time.monotonic() + start_timeout_s)
    except BaseException as error:
        supervisor.terminate()
        try:
            supervisor.wait(stop_timeout_s + STOP_MARGIN_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
        if isinstance(error, StartFailed):
            raise StartFailed(f"{error}\n{_tail(log)}\nThe whole log: {log}") from None
        raise


def _await_ready(supervisor: subprocess.Popen[bytes], name: str, runs: RunDirectory, deadline_s: float) -> RunRecord:
    while supervisor.poll() is None:
        record = runs.find(name)
        if record is not None and record.pid == supervisor.pid and record.urls:
            return record
        if time.monotonic() >= deadline_s:
            raise StartFailed("the supervisor was not ready in time")
        time.sleep(POLL_S)
    raise StartFailed(f"the supervisor ended with status {supervisor.returncode}:")


def stop_run(name: str, runs: RunDirectory, margin_s: float = STOP_MARGIN_S) -> None:
    """Stops the cluster `name` and waits for its end; also cleans up after a supervisor that was killed.

    Kills the supervisor `margin_s` after its nodes' time to stop. Raises NotRunning when there was nothing to stop.
    """
    record = runs.find(name)
    if record is None:
        raise NotRunning(f"no cluster {name!r} runs here: nothing to stop")
    deadline_s = time.monotonic() + record.stop_timeout_s + margin_s
    if record.is_alive():
        send_signal(record.pid, signal.SIGTERM)
        if not wait_gone(record.pid, record.started_s, deadline_s):
            send_signal(record.pid, signal.SIGKILL)
    end_processes_of_run(record.run_id, time.monotonic())
    runs.remove(record)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
