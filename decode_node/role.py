"""The decode role: receives prompts from prefill nodes, and generates from the second token on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from decode_node.accounting import HitAccounting
from decode_node.config import DecodeConfig
from decode_node.driver import DecodeDriver
from decode_node.orphans import Orphans
from headrace.wire.messages import (
    DecodeCommand,
    DecodeEvent,
    Start,
)
from node_runtime.fetch import Fetches
from node_runtime.runtime import NodeRuntime
from node_runtime.token_feeds import UNFED, FedCall
from transfer.receiver import TransferReceiver


class DecodeRole:
    """Serves any number of requests at a time."""

    def __init__(self, runtime: NodeRuntime, config: DecodeConfig, fetches: Fetches) -> None:
        self._runtime = runtime
        self._config = config
        self._fetches = fetches
        self._receiver = TransferReceiver(runtime.transport, runtime.incoming)
        self._accounting = HitAccounting(runtime.layout)
        self._orphans: Orphans[DecodeDriver] = Orphans(config.orphan_timeout_s, runtime.status_changed)

    def counters(self) -> dict[str, float]:
        orphans = {"orphans_kept": float(self._orphans.num_kept), "orphans_adopted": float(self._orphans.num_adopted)}
        return {**self._accounting.counters(), **orphans}

    def orphans(self) -> tuple[str, ...]:
        return self._orphans.ids

    async def abandon(self, request_ids: Sequence[str]) -> None:
        """Ends those of these orphans that are still here: their router was not lost, and goes on without them."""
        await self._orphans.abandon(request_ids)

    async def close(self) -> None:
        """Gives up orphans. Calls have ended with the gRPC server, and sessions end with the transport."""
        await self._orphans.close()

    def run(
        self, start: Start, commands: AsyncIterator[DecodeCommand], timeout_s: float, fed: FedCall = UNFED
    ) -> AsyncGenerator[DecodeEvent, None]:
        """Returns the messages for the router. Closing the iterator aborts the request; all it held is given back. Only
        a resumable one that its router has not abandoned is kept for a while, for another router.

        commands   the router's, after `start`
        fed        takes most tokens, instead of a message for each
        Raises BadRequest, also when `commands` does; NoCapacity; LayoutMismatch.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        orphan = self._orphans.take(start.request)
        if orphan is not None:
            return orphan.go_on(start.request, commands, deadline_s, fed)
        return DecodeDriver(
            self._runtime,
            self._config,
            self._receiver,
            self._accounting,
            self._orphans,
            self._fetches,
            start=start,
            deadline_s=deadline_s,
        ).run(commands, fed)
