"""Transfer sessions as both roles use them: the reservation, its plan, landing, and a request's errors."""

from __future__ import annotations

from functools import partial

from headrace.engine.sequence import Admitted, Sequence
from headrace.wire.messages import Reservation
from node_runtime.packing import BlockLocation
from node_runtime.runtime import NodeRuntime
from transfer.buffers import StagingBuffer
from transfer.protocol.authentication import new_secret
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.receiver import IncomingTransfer, TransferReceiver
from transfer.sender import OutgoingTransfer, TransferSender

LEASE_MARGIN_S = 5.0
"""How long a lease outlives its session's deadline. Copies enqueued on a device before the deadline may run after it:
they take milliseconds, but may wait behind the device's other work. A session that has ended releases its lease at
once."""


class NoCapacity(Exception):
    """The cache had no blocks or slot for the request before its deadline: another node may, or this one later."""


class CheckpointMissing(Exception):
    """The checkpoint that a prefill node wants to fetch is not in this node's cache: the prefill node computes."""


def plan_of(reservation: Reservation, max_message_bytes: int) -> TransferPlan:
    """Returns the messages of a reservation's session.

    Sender and receiver each compute it, from their own `max_message_bytes`, which the router requires to be equal.
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
    timeout_s: float,
) -> tuple[Reservation, IncomingTransfer]:
    """Opens a session for the blocks beyond the attention hit and for the state; returns it with the sender's terms.

    sequence    admitted to wait for a transfer, which lands in its own blocks and slot
    nonce       a fresh one, which names the session
    num_tokens  how many tokens of the prompt the sender has
    deadline_s  when the session fails, on the event loop's clock
    timeout_s   the longest time without progress, once the sender has begun
    Raises LayoutMismatch when there is no such plan, or a message of it fits no staging buffer.
    """
    reservation = Reservation(
        nonce=nonce,
        attention_hit_tokens=admitted.reused_tokens,
        num_tokens=num_tokens,
        transfer_address=runtime.transport.address,
        layout=runtime.wire_layout,
        timeout_s=timeout_s,
        secret=new_secret(),
    )
    land = partial(_land, runtime, sequence, admitted)
    plan = plan_of(reservation, runtime.config.message_bytes)
    incoming = receiver.expect(plan, secret=reservation.secret, land=land, deadline_s=deadline_s, timeout_s=timeout_s)
    return reservation, incoming


def send(runtime: NodeRuntime, sequence: Sequence, reservation: Reservation, *, deadline_s: float) -> OutgoingTransfer:
    """Opens the session in which a sequence's own blocks and state go to another node's reservation.

    The sequence keeps them until its release, or a little beyond `deadline_s` (on the event loop's clock) should that
    never come. Raises LayoutMismatch when there is no such plan, or a message of it fits no staging buffer.
    """
    plan = plan_of(reservation, runtime.config.message_bytes)
    lease_ends_s = deadline_s + LEASE_MARGIN_S
    runtime.loop.post(lambda: runtime.engine.lease(sequence, lease_ends_s))
    return TransferSender(runtime.transport, runtime.outgoing).open(
        plan,
        reservation.transfer_address,
        secret=reservation.secret,
        pack=partial(
            runtime.packing.gather,
            locate=lambda: BlockLocation(sequence.held.block_ids, sequence.state_slot, reservation.layout),
        ),
        deadline_s=deadline_s,
        timeout_s=reservation.timeout_s,
    )


async def _land(
    runtime: NodeRuntime, sequence: Sequence, admitted: Admitted, message: PlannedMessage, buffer: StagingBuffer
) -> None:
    """Copies one verified message into the request's own blocks or slot."""
    await runtime.packing.wait_event(admitted.device_event)
    wire = runtime.wire_layout
    await runtime.packing.scatter(
        message, buffer, lambda: BlockLocation(sequence.held.block_ids, sequence.held.slot, wire)
    )
