"""SIGINT and SIGTERM as a request that the supervisor checks between its steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from deploy.errors import StopRequested


class StopRequest:
    """Set by the first SIGINT or SIGTERM. A second one raises KeyboardInterrupt: stop without waiting."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def install(self) -> None:
        """Handles both signals. Call it again after `ray.init`, which installs its own handlers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """True once a stop is requested; False after `timeout_s` without one."""
        return self._event.wait(timeout_s)

    def check(self) -> None:
        """Raises StopRequested once a stop is requested."""
        if self._event.is_set():
            raise StopRequested

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()
