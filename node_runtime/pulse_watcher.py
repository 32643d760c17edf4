"""A small process beside a node, which ends the node when that can run no Python any more.

Something in a node may keep the GIL and not return: an extension that loops or waits with it. Then no thread of the
node runs, its watchdog's neither. It has neither torch nor Headrace's other packages: about 10 MB of memory.

    python -m node_runtime.pulse_watcher NAME LIMIT_S <pulses
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from node_runtime.stall_clock import TICK_S, StallClock

LAST_WORDS_S = 2.0
"""How long a process may take to print its stacks and end by SIGABRT, before SIGKILL ends it."""
LONGEST_READ = 1 << 16


def main(name: str, limit_s: float) -> None:
    """Watches the process that has started this one until it ends. stdin: a byte for each of its pulses."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they go to a whole group: the node ends in its own time
    watched = os.getppid()
    clock, pulses = StallClock(), 0
    while os.getppid() == watched:
        if select.select([sys.stdin], [], [], TICK_S)[0]:
            if not (arrived := os.read(sys.stdin.fileno(), LONGEST_READ)):
                return
            pulses += len(arrived)
        elif is_stopped(watched):
            pulses += 1  # SIGSTOP or a debugger: its time does not count
        clock.tick(pulses, time.monotonic())
        if clock.stalled_s >= limit_s:
            print(
                f"{name}: no thread has run Python for {clock.stalled_s:.1f} s (watchdog_s {limit_s:g}), one of them "
                f"keeps the GIL: process {watched} is ended. Its threads:",
                file=sys.stderr,
                flush=True,
            )
            end(watched)
            return


def is_stopped(pid: int) -> bool:
    """True for a process that a signal or a debugger has stopped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


def end(pid: int) -> None:
    """Ends the parent process: by SIGABRT, at which it prints its stacks without the GIL, else by SIGKILL."""
    deadline_s = time.monotonic() + LAST_WORDS_S
    os.kill(pid, signal.SIGABRT)
    while os.getppid() == pid and time.monotonic() < deadline_s:
        time.sleep(0.01)
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
