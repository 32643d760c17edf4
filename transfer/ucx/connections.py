"""The two ends of a UCX connection. Peer error handling is on at both, or a dead peer would hang for ever."""

import asyncio
from collections.abc import Callable
from typing import Any

import ucxx._lib.libucxx as ucx

from transfer.buffers import Buffer
from transfer.protocol.envelope import Tag
from transfer.protocol.errors import ConnectionLost
from transfer.protocol.stats import TransportStats
from transfer.ucx.lanes import endpoint_lanes
from transfer.ucx.lifeline import Lifeline
from transfer.ucx.progress import ProgressLoop

Watcher = Callable[[str], None]


class Link:
    """An endpoint and who wants to know of its end. Once lost it stays lost."""

    def __init__(
        self, progress: ProgressLoop, endpoint: Any, stats: TransportStats, on_lost: Callable[["Link"], None]
    ) -> None:
        self.endpoint = endpoint
        self._stats = stats
        self.lost: str | None = None
        self._loop = asyncio.get_running_loop()
        self._progress = progress
        self._on_lost = on_lost
        self._watchers: dict[object, Watcher] = {}
        self._lifeline: Lifeline | None = None
        # The callback comes from inside UCX's progress, where an endpoint must not be closed.
        endpoint.set_close_callback(self._closed_by_ucx)

    def tie_to(self, lifeline: Lifeline) -> None:
        """They end together, except that a lifeline's orderly end leaves the news to UCX."""
        if self.lost is not None:
            lifeline.close()
            return
        self._lifeline = lifeline
        lifeline.ended.add_done_callback(self._lifeline_ended)

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
        """Force-close. Operations in flight complete with an error in a coming turn; watchers are told then.

        Not now: a session whose own deadline closed this has a timer due as well, and that is its cause.

        forced   it worked, but an operation on it outlived its deadline
        """
        if self.lost is not None:
            return
        self.lost = reason
        self._stats.connections_lost += 1
        self._stats.forced_closes += forced
        if self._lifeline is not None:
            self._lifeline.close()
        self.endpoint.close_blocking()
        self.endpoint.remove_close_callback()
        self._progress.wake()
        self._on_lost(self)
        self._loop.call_soon(self._tell, reason)

    def _tell(self, reason: str) -> None:
        for watcher in tuple(self._watchers.values()):
            watcher(reason)
        self._watchers.clear()

    def _lifeline_ended(self, ended: asyncio.Future[str | None]) -> None:
        if (reason := ended.result()) is not None:
            self.lose(reason)

    def _closed_by_ucx(self, *_: object) -> None:
        self._loop.call_soon(self.lose, "the connection broke or its peer died")


class UcxConnection(Link):
    """The sending end. The peer was told `id` when it was made, and is again in every envelope."""

    def __init__(
        self,
        progress: ProgressLoop,
        endpoint: Any,
        stats: TransportStats,
        on_lost: Callable[[Link], None],
        connection_id: int,
    ) -> None:
        super().__init__(progress, endpoint, stats, on_lost)
        self.id = connection_id

    @property
    def lanes(self) -> tuple[str, ...]:
        """The transports and devices in use, such as `tcp/eth0`; what is allowed may be more."""
        return endpoint_lanes(self.endpoint.handle) if self.lost is None else ()

    def send(self, tag: Tag, part: Buffer, deadline_s: float) -> asyncio.Future[None]:
        if self.lost is not None:
            failed: asyncio.Future[None] = self._loop.create_future()
            failed.set_exception(ConnectionLost(self.lost))
            return failed
        self._stats.sent_parts += 1
        self._stats.sent_bytes += part.nbytes
        return self._progress.start(
            lambda array: self.endpoint.tag_send(array, ucx.UCXXTag(int(tag))),
            part,
            deadline_s,
            lambda: self.lose(f"{tag} was not taken by its deadline", forced=True),
            tag.nonce,
        )
