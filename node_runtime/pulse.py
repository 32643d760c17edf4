"""A process's sign that it can run Python, for the small process that watches it from outside."""

from __future__ import annotations

import faulthandler
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = str(Path(__file__).parent.parent)
END_TIMEOUT_S = 1.0


class Pulse:
    """Starts a `pulse_watcher.py`, which ends this process `limit_s` after its last `beat`."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._name = name
        if not faulthandler.is_enabled():
            with suppress(RuntimeError, ValueError, OSError):  # stderr is no file: it ends without its stacks
                faulthandler.enable()
        # Without `site`, whose import hooks of editable packages take longer than all else.
        command = [sys.executable, "-S", "-P", "-m", "node_runtime.pulse_watcher", name, str(limit_s)]
        environment = {**os.environ, "PYTHONPATH": SOURCES}
        self._watcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, bufsize=0
        )
        assert self._watcher.stdin is not None
        self._pipe = self._watcher.stdin
        os.set_blocking(self._pipe.fileno(), False)
        self._is_watched = True

    @property
    def watcher_pid(self) -> int:
        return self._watcher.pid

    def beat(self) -> None:
        """Writes one byte. Never waits: a watcher that reads nothing has bytes enough."""
        if self._is_watched:
            try:
                self._pipe.write(b".")
            except OSError:  # most likely a broken pipe
                self._is_watched = False
                log.warning("%s: its pulse watcher has ended: a hang that keeps the GIL would go unnoticed", self._name)

    def close(self) -> None:
        """Ends the watcher."""
        self._pipe.close()
        try:
            self._watcher.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()
