"""A server's process as its host sees it: its log and its niceness."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr() -> None:
    """Logs lines of level INFO and above with their time, in the format of every Headrace process."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)


def machine_id() -> str:
    """The id of this machine since it was started; its name where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def own_niceness() -> int:
    """The niceness of this thread."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def take_niceness(niceness: int) -> None:
    """Sets the niceness of all threads of this process; where it may not be lowered, logs a warning with the remedy.

    Ray starts its workers at niceness 15. Beside two busy loops on two cores, nodes at 15 served 0.19 requests/s where
    nodes at 0 served 4.2, and missed heartbeats while they worked.
    """
    own = own_niceness()
    if own == niceness:
        return
    try:
        for thread in os.listdir("/proc/self/task"):  # on Linux each thread has its own; new ones inherit it
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
    except PermissionError:
        log.warning(
            "this process runs at niceness %d instead of %d and may not lower it: on a busy host it becomes slow and "
            "misses heartbeats. Start Ray with RAY_worker_niceness=0 in the environment of `ray start`, on every host",
            own,
            niceness,
        )
