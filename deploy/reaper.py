"""A process that outlives the supervisor by a moment: it ends the run's remaining processes, even after a crash.

Ray ends most of its processes with the one that started them, but not all: after a SIGKILL its agents sometimes stay.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

from deploy.processes import end_processes_of_run, run_folder

SWEEP_S = 5.0
"""Time for Ray to end its processes by itself; it needs a second or two."""


def start_reaper(run_id: str) -> subprocess.Popen[bytes]:
    """Starts a reaper. Its standard input is a pipe from this process; when the pipe closes, or this process dies, the
    reaper ends the run.

    Start it outside of the run's working folder: it is not part of the run. Signals to this process group do not reach
    it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.reaper", run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    """Waits for the end of standard input, then for the run's processes; kills those that are left."""
    run_id = sys.argv[1]
    sys.stdin.read()
    end_processes_of_run(run_id, time.monotonic() + SWEEP_S)
    shutil.rmtree(run_folder(run_id), ignore_errors=True)


if __name__ == "__main__":
    main()
