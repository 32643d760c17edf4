"""A prefill node's lines to the decode nodes that it fetches from."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from headrace.wire.client import FetchClient
from headrace.wire.messages import FetchSource

IDLE_S = 600.0
"""A line that nobody has used for so long is closed: its source may have left for good (one that comes back has
another address as a rule), and a new line costs milliseconds."""


class FetchChannels:
    """One line an address, for as long as it is used.

    connect   opens a line
    spawn     runs the closing of one
    grace_s   what fetches that still use a line have then
    """

    def __init__(
        self,
        connect: Callable[[FetchSource], FetchClient],
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        grace_s: float,
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._spawn = spawn
        self._grace_s = grace_s
        self._lines: dict[str, FetchClient] = {}
        self._used_s: dict[str, float] = {}
        """When a fetch last began on it, by address."""

    def to(self, fetch_source: FetchSource) -> FetchClient:
        """The line to this fetch source, for one fetch."""
        now_s = self._clock()
        for address in [address for address, used_s in self._used_s.items() if used_s < now_s - IDLE_S]:
            self.hang_up(address)
        if fetch_source.address not in self._lines:
            self._lines[fetch_source.address] = self._connect(fetch_source)
        self._used_s[fetch_source.address] = now_s
        return self._lines[fetch_source.address]

    def hang_up(self, address: str) -> None:
        """Close the line to it, if there is one."""
        if (line := self._lines.pop(address, None)) is not None:
            del self._used_s[address]
            self._spawn(line.close(self._grace_s))

    async def close(self) -> None:
        for line in self._lines.values():
            await line.close()
