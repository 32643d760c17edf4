"""The two ends of a UCX connection. Both enable peer error handling: without it a dead peer would hang for ever."""

import asyncio
from collections.abc import Callable
from typing import Any

import ucxx._lib.libucxx as ucx

from transfer.buffers import Buffer
from transfer.protocol.envelope import Tag
from transfer.protocol.errors import ConnectionLost
from transfer.protocol.stats import TransportStats
from transfer.ucx.keepalive import Keepalive
from transfer.ucx.lanes import endpoint_lanes
from transfer.ucx.progress import ProgressLoop

Watcher = Callable[[str], None]


class Endpoint:
    """A UCX endpoint, its keepalive connection, and the watchers of its loss. Once lost it stays lost.

    ucx_endpoint   ucxx's endpoint
    lost           None, or why it was lost
    """

    def __init__(
        self, progress: ProgressLoop, ucx_endpoint: Any, stats: TransportStats, on_lost: Callable[["Endpoint"], None]
    ) -> None:
        self.ucx_endpoint = ucx_endpoint
        self._stats = stats
        self.lost: str | None = None
        self._loop = asyncio.get_running_loop()
        self._progress = progress
        self._on_lost = on_lost
        self._watchers: dict[object, Watcher] = {}
        self._keepalive: Keepalive | None = None
        # The callback comes from inside UCX's progress, where an endpoint must not be closed.
        ucx_endpoint.set_close_callback(self._closed_by_ucx)

    def attach(self, keepalive: Keepalive) -> None:
        """Ends both together, except that UCX itself reports an orderly end."""
        if self.lost is not None:
            keepalive.close()
            return
        self._keepalive = keepalive
        keepalive.ended.add_done_callback(self._keepalive_ended)

    def watch(self, on_lost: Watcher) -> Callable[[], None]:
        if self.lost is not None:
            self._loop.call_soon(on_lost, self.lost)
            return lambda: None
        key = object()
        self._watchers[key] = on_lost

        def stop_watching() -> None:
            self._watchers.pop(key, None)

        return stop_watching

    def lose(self, reason: str, *, forced: bool = False) -> None:
        """Force-closes the endpoint. A coming turn completes its operations with an error and calls its watchers.

        Not this turn: a session whose own deadline closed the endpoint has a timer due as well, and the deadline is
        its cause.

        forced   the connection worked, but an operation on it outlived its deadline
        """
        if self.lost is not None:
            return
        self.lost = reason
        self._stats.connections_lost += 1
        self._stats.forced_closes += forced
        if self._keepalive is not None:
            self._keepalive.close()
        self.ucx_endpoint.close_blocking()
        self.ucx_endpoint.remove_close_callback()
        self._progress.wake()
        self._on_lost(self)
        self._loop.call_soon(self._notify, reason)

    def _notify(self, reason: str) -> None:
        for watcher in tuple(self._watchers.values()):
            watcher(reason)
        self._watchers.clear()

    def _keepalive_ended(self, ended: asyncio.Future[str | None]) -> None:
        if (reason := ended.result()) is not None:
            self.lose(reason)

    def _closed_by_ucx(self, *_: object) -> None:
        self._loop.call_soon(self.lose, "the connection broke or its peer died")


class UcxConnection(Endpoint):
    """The sending end. It sends the peer its `id` when it is made, and again in every envelope."""

    def __init__(
        self,
        progress: ProgressLoop,
        ucx_endpoint: Any,
        stats: TransportStats,
        on_lost: Callable[[Endpoint], None],
        connection_id: int,
    ) -> None:
        super().__init__(progress, ucx_endpoint, stats, on_lost)
        self.id = connection_id

    @property
    def lanes(self) -> tuple[str, ...]:
        """The transports and devices in use, such as `tcp/eth0`; the settings may allow more."""
        return endpoint_lanes(self.ucx_endpoint.handle) if self.lost is None else ()

    def send(self, tag: Tag, part: Buffer, deadline_s: float) -> asyncio.Future[None]:
        if self.lost is not None:
            failed: asyncio.Future[None] = self._loop.create_future()
            failed.set_exception(ConnectionLost(self.lost))
            return failed
        self._stats.sent_parts += 1
        self._stats.sent_bytes += part.nbytes
        return self._progress.start(
            lambda array: self.ucx_endpoint.tag_send(array, ucx.UCXXTag(int(tag))),
            part,
            deadline_s,
            lambda: self.lose(f"{tag} was not taken by its deadline", forced=True),
            tag.nonce,
        )
