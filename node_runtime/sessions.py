"""What both roles do around a session: reserve for one that lands in a sequence, and lease what one moves."""

from __future__ import annotations

import asyncio
from functools import partial

from headrace.engine.sequence import Admitted, Sequence
from headrace.wire.messages import Reservation
from node_runtime.packing import BlockLocation
from node_runtime.runtime import NodeRuntime
from transfer.buffers import StagingBuffer
from transfer.protocol.authentication import new_secret
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.receiver import IncomingTransfer, TransferReceiver

LEASE_MARGIN_S = 5.0
"""By which a lease outlives its session's deadline: copies that were enqueued on a device before the deadline may still
run when it has passed. They take milliseconds, and a session that has settled gives its lease back at once; the rest is
for a device behind whose other work they wait."""


def plan_of(reservation: Reservation, max_message_bytes: int) -> TransferPlan:
    """The messages of a reservation's session. Sender and receiver compute it, each from its own `max_message_bytes`,
    which the router requires to be equal.

    Raises LayoutMismatch when the reservation's numbers do not make a plan.
    """
    layout = reservation.layout
    return TransferPlan(
        nonce=reservation.nonce,
        num_tokens=reservation.num_tokens,
        first_block=reservation.attention_hit_tokens // layout.block_size,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        state_bytes=layout.state_bytes,
        max_message_bytes=max_message_bytes,
    )


def reserve(
    runtime: NodeRuntime,
    receiver: TransferReceiver,
    sequence: Sequence,
    admitted: Admitted,
    *,
    nonce: int,
    num_tokens: int,
    deadline_s: float,
) -> tuple[Reservation, IncomingTransfer]:
    """What a sender is to be told, and the session that expects it: blocks beyond the attention hit, and the state.

    sequence          admitted to wait for them; they land in its own blocks and slot
    nonce             a fresh one, which names the session
    num_tokens        of its prompt, that the sender has
    deadline_s        the session's, on the event loop's clock
    Raises LayoutMismatch when that makes no plan, or none that fits the staging buffers.
    """
    reservation = Reservation(
        nonce=nonce,
        attention_hit_tokens=admitted.reused_tokens,
        num_tokens=num_tokens,
        transfer_address=runtime.transport.address,
        layout=runtime.wire_layout,
        deadline_s=deadline_s - asyncio.get_running_loop().time(),
        secret=new_secret(),
    )
    land = partial(_land, runtime, sequence, admitted)
    plan = plan_of(reservation, runtime.config.message_bytes)
    incoming = receiver.expect(plan, secret=reservation.secret, land=land, deadline_s=deadline_s)
    return reservation, incoming


async def _land(
    runtime: NodeRuntime, sequence: Sequence, admitted: Admitted, message: PlannedMessage, buffer: StagingBuffer
) -> None:
    """One verified message into the request's own blocks or slot."""
    await runtime.packing.wait_event(admitted.device_event)
    wire = runtime.wire_layout
    await runtime.packing.scatter(
        message, buffer, lambda: BlockLocation(sequence.held.block_ids, sequence.held.slot, wire)
    )
