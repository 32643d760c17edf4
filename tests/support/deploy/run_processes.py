"""Processes and run records like those of a supervisor, without Ray."""

import os
from dataclasses import replace

from deploy.processes import started_at_s
from deploy.runs import RunDirectory, RunRecord

OBEYS = "import time; print(1, flush=True); time.sleep(60)"
STOPS_SLOWLY = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(7)));" + OBEYS
)
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + OBEYS

OURS = f"test-{os.getpid()}"
"""Begins the ids of these tests' runs: their folders lie in /tmp, where tests of other checkouts run, too."""
RUN, OTHER_RUN, NO_RUN, ELSEWHERE = (f"{OURS}-{name}" for name in ("run", "other", "none", "elsewhere"))


def claim_by(
    runs: RunDirectory, pid: int, name: str = "x", run_id: str = RUN, stop_timeout_s: float = 15.0
) -> RunRecord:
    """The record that a supervisor process of this pid would have written."""
    with runs.claim(name, run_id, stop_timeout_s) as record:
        pass
    record = replace(record, pid=pid, started_s=started_at_s(pid))
    runs.publish(record, ["http://127.0.0.1:1"], "ray")
    return record
