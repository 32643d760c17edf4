"""Serves the fetches of other nodes: sends a checkpoint of this node and the blocks below it.

Both are immutable and stay leased while they are sent; the request that published them may have ended long ago.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from headrace.cache.claims import Hold
from headrace.cache.layout import CacheLayout
from headrace.cache.leases import LeaseId
from headrace.cache.types import PrefixKey
from headrace.engine.loop import EngineLost
from headrace.engine.sequence import DeviceEvent
from headrace.wire.messages import FetchReply, FetchRequest
from node_runtime.packing import BlockLocation
from node_runtime.runtime import NodeRuntime
from node_runtime.sessions import LEASE_MARGIN_S, CheckpointMissing, plan_of
from transfer.protocol.errors import TransferFailed
from transfer.sender import OutgoingTransfer, TransferSender


@dataclass(frozen=True)
class _Leased:
    hold: Hold
    lease: LeaseId
    device_event: DeviceEvent | None  # the device has computed blocks and state when it reaches this


class FetchServer:
    """Serves any number of fetches at a time; staging limits how many messages are on their way."""

    def __init__(self, runtime: NodeRuntime) -> None:
        self._runtime = runtime
        self._sender = TransferSender(runtime.transport, runtime.outgoing)
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
        """Returns when everything was sent. Cancelling it aborts the transfer; either way the lease is given back.

        Raises LayoutMismatch, CheckpointMissing, TransferFailed.
        """
        reservation = request.reservation
        self._runtime.require_layout(reservation.layout)
        plan = plan_of(reservation, self._runtime.config.message_bytes)
        deadline_s = asyncio.get_running_loop().time() + min(timeout_s, reservation.timeout_s)
        # A little longer than the session: should the clean-up below never run, nothing is held for ever.
        lease_ends_s = deadline_s + LEASE_MARGIN_S
        leasing = asyncio.ensure_future(self._loop.call(lambda: self._lease(request, lease_ends_s)))
        transfer: OutgoingTransfer | None = None
        try:
            leased = await asyncio.shield(leasing)
            if leased is None:
                self._gone += 1
                raise CheckpointMissing(
                    f"no checkpoint at {reservation.num_tokens} tokens of that prefix, or no longer"
                )
            transfer = self._sender.open(
                plan,
                reservation.transfer_address,
                secret=reservation.secret,
                pack=partial(self._runtime.packing.gather, locate=partial(_location, leased.hold, reservation.layout)),
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

    def _lease(self, request: FetchRequest, deadline_s: float) -> _Leased | None:
        """Leases the checkpoint and the blocks below it; None: it is gone. Runs in the engine's thread."""
        cache = self._engine.cache
        checkpoint = cache.find_checkpoint(PrefixKey(request.key))
        if checkpoint is None or checkpoint.num_tokens != request.reservation.num_tokens:
            return None
        hold = cache.hold_checkpoint(checkpoint)
        if hold is None:
            return None
        lease = self._engine.leases.grant(partial(cache.drop, hold), deadline_s=deadline_s)
        return _Leased(hold, lease, self._runtime.memory.record_event())

    async def _give_back(self, leasing: asyncio.Future[_Leased | None], transfer: OutgoingTransfer | None) -> None:
        if transfer is not None:
            transfer.cancel()
            with suppress(TransferFailed):
                await transfer.done()
        with suppress(EngineLost):
            if (leased := await leasing) is not None:
                self._loop.post(partial(self._engine.leases.release, leased.lease))


def _location(hold: Hold, wire: CacheLayout) -> BlockLocation:
    """Returns where the prefix lies. Raises NotHeld once the lease has run out."""
    hold.require_held()
    assert hold.checkpoint is not None, "_lease holds a checkpoint"
    return BlockLocation(hold.block_ids, hold.checkpoint.slot, wire)
