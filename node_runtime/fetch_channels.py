"""A node's gRPC clients for the nodes that it fetches from."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from headrace.wire.client import FetchClient
from headrace.wire.messages import FetchSource

IDLE_S = 600.0
"""A client that no fetch has used for this long is closed. Its source may have left for good (one that comes back
usually has another address), and connecting again takes milliseconds."""


class FetchChannels:
    """One client per address, open while it is used.

    connect   opens a client
    spawn     runs the closing of one in the background
    grace_s   how long fetches that still use a client may go on once it is being closed
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
        self._clients: dict[str, FetchClient] = {}
        self._used_s: dict[str, float] = {}
        """When the last fetch began, by address."""

    def client(self, fetch_source: FetchSource) -> FetchClient:
        """Returns the client for this fetch source, for one fetch."""
        now_s = self._clock()
        for address in [address for address, used_s in self._used_s.items() if used_s < now_s - IDLE_S]:
            self.disconnect(address)
        if fetch_source.address not in self._clients:
            self._clients[fetch_source.address] = self._connect(fetch_source)
        self._used_s[fetch_source.address] = now_s
        return self._clients[fetch_source.address]

    def disconnect(self, address: str) -> None:
        """Closes the client for this address, if there is one."""
        if (client := self._clients.pop(address, None)) is not None:
            del self._used_s[address]
            self._spawn(client.close(self._grace_s))

    async def close(self) -> None:
        """Closes all clients at once."""
        for client in self._clients.values():
            await client.close()
