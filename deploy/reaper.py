"""A process that outlives the supervisor by a moment: it ends what is left of the run, however the supervisor ended.

Ray binds its processes to the one that started them, but not all of them: after a SIGKILL its agents stay at times.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

from deploy.processes import end_processes_of_run, run_folder

SWEEP_S = 5.0
"""What Ray gets to end its processes by itself; it needs a second or two."""


def start_reaper(run_id: str) -> subprocess.Popen[bytes]:
    """Its standard input is a pipe from this process: the pipe's end, by our word or by our death, ends the run.

    Start it outside of the run's working folder: it is not part of the run. Signals to our group do not reach it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.reaper", run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    """Waits for the end of standard input, then for the run's processes; kills those that stay."""
    run_id = sys.argv[1]
    sys.stdin.read()
    end_processes_of_run(run_id, time.monotonic() + SWEEP_S)
    shutil.rmtree(run_folder(run_id), ignore_errors=True)


if __name__ == "__main__":
    main()
