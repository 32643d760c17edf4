"""SIGINT and SIGTERM as a request that the supervisor checks between its steps."""

from __future__ import annotations

import signal
from types import FrameType

from deploy.errors import StopRequested


class StopRequest:
    """Set by the first SIGINT or SIGTERM. A second one raises KeyboardInterrupt: stop without waiting.

    A plain flag, polled: a `threading.Event` has a lock, and a signal that arrives while the main thread holds it would
    wait for that lock in the same thread, for ever.
    """

    def __init__(self) -> None:
        self._is_set = False

    def install(self) -> None:
        """Handles both signals. Call it again after `ray.init`, which installs its own handlers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    @property
    def is_set(self) -> bool:
        """True once a stop is requested."""
        return self._is_set

    def check(self) -> None:
        """Raises StopRequested once a stop is requested."""
        if self._is_set:
            raise StopRequested

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True
