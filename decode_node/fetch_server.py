"""Sends what this decode node holds of a prefix to a prefill node that asks: a hand-over in the other direction.

The checkpoint and the blocks below it are immutable and stay leased while they move; no request of this node
has to be running for that.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial

from headrace.cache.claims import Hold
from headrace.cache.layout import CacheLayout
from headrace.cache.leases import LeaseId
from headrace.cache.types import PrefixKey
from headrace.engine.loop import EngineLost
from headrace.engine.sequence import DeviceEvent
from headrace.wire.messages import FetchReply, FetchRequest
from node_runtime.errors import CheckpointGone
from node_runtime.packing import BlockLocation, Locate
from node_runtime.runtime import NodeRuntime
from node_runtime.sessions import LEASE_MARGIN_S, plan_of
from transfer.buffers import StagingBuffer
from transfer.protocol.errors import TransferFailed
from transfer.protocol.plan import PlannedMessage
from transfer.sender import OutgoingTransfer, TransferSender
from transfer.transfer import PIPELINE_DEPTH


@dataclass(frozen=True)
class _Leased:
    hold: Hold
    lease: LeaseId
    device_event: DeviceEvent | None  # what it holds has been computed when the device reaches it


class FetchServer:
    """Serves exports on one runtime; any number at a time, as many messages on their way as staging has buffers."""

    def __init__(self, runtime: NodeRuntime) -> None:
        self._runtime = runtime
        self._engine = runtime.engine
        self._loop = runtime.loop
        self._served = 0
        self._tokens = 0
        self._bytes = 0
        self._gone = 0
        self._failures = 0

    def counters(self) -> dict[str, float]:
        return {
            "fetches_served": float(self._served),
            "fetch_served_tokens": float(self._tokens),
            "fetch_served_bytes": float(self._bytes),
            "fetches_gone": float(self._gone),
            "fetch_serve_failures": float(self._failures),
        }

    async def run(self, request: FetchRequest, timeout_s: float) -> FetchReply:
        """Returns when everything was sent. Cancelling it ends the export; either way all it held comes back.

        Raises LayoutMismatch, CheckpointGone, TransferFailed.
        """
        reservation = request.reservation
        self._runtime.require_layout(reservation.layout)
        plan = plan_of(reservation, self._runtime.config.message_bytes)
        deadline_s = asyncio.get_running_loop().time() + min(timeout_s, reservation.deadline_s)
        # A little longer than the session: should the clean-up below never come, nothing is held for ever.
        lease_ends_s = deadline_s + LEASE_MARGIN_S
        leasing = asyncio.ensure_future(self._loop.call(lambda: self._lease(request, lease_ends_s)))
        transfer: OutgoingTransfer | None = None
        try:
            leased = await asyncio.shield(leasing)
            if leased is None:
                self._gone += 1
                raise CheckpointGone(f"no checkpoint at {reservation.num_tokens} tokens of that prefix, or no longer")
            transfer = self._sender.open(
                plan,
                reservation.transfer_address,
                secret=reservation.secret,
                pack=partial(self._pack, partial(_location, leased.hold, reservation.layout)),
                deadline_s=deadline_s,
            )
            await self._runtime.packing.wait_event(leased.device_event)
            transfer.tokens_computed(reservation.num_tokens)
            transfer.finish()
            stats = await transfer.done()
        except TransferFailed:
            self._failures += 1
            raise
        finally:
            self._runtime.spawn(self._give_back(leasing, transfer))
        self._served += 1
        self._tokens += reservation.num_tokens
        self._bytes += stats.attention_bytes + stats.state_bytes
        return FetchReply(self._runtime.layout)

    @cached_property
    def _sender(self) -> TransferSender:
        """Its staging takes no memory before the first export."""
        return TransferSender(self._runtime.transport, self._runtime.new_staging(PIPELINE_DEPTH))

    def _lease(self, request: FetchRequest, deadline_s: float) -> _Leased | None:
        """In the engine's thread: keeps the checkpoint and the blocks below it from eviction; None: it is gone."""
        cache = self._engine.cache
        checkpoint = cache.find_checkpoint(PrefixKey(request.key))
        if checkpoint is None or checkpoint.num_tokens != request.reservation.num_tokens:
            return None
        hold = cache.hold_checkpoint(checkpoint)
        if hold is None:
            return None
        lease = self._engine.leases.grant(partial(cache.drop, hold), deadline_s=deadline_s)
        return _Leased(hold, lease, self._runtime.memory.record_event())

    async def _pack(self, locate: Locate, message: PlannedMessage, buffer: StagingBuffer) -> None:
        await self._runtime.packing.gather(message, buffer, locate)

    async def _give_back(self, leasing: asyncio.Future[_Leased | None], transfer: OutgoingTransfer | None) -> None:
        if transfer is not None:
            transfer.cancel()
            with suppress(TransferFailed):
                await transfer.done()
        with suppress(EngineLost):
            if (leased := await leasing) is not None:
                self._loop.post(partial(self._engine.leases.release, leased.lease))


def _location(hold: Hold, wire: CacheLayout) -> BlockLocation:
    """Raises NotHeld once the lease has run out."""
    hold.require_held()
    assert hold.checkpoint is not None, "that is what was held"
    return BlockLocation(hold.block_ids, hold.checkpoint.slot, wire)
