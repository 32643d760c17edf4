"""The transfer plan of a reservation: the same on the node that made it and the node that serves it."""

from __future__ import annotations

from headrace.wire.messages import Reservation
from transfer.protocol.plan import TransferPlan


def smaller(own_bytes: int, peers_bytes: int | None) -> int:
    """The longest message that both sides' staging takes. None: nothing is known of the peer, which says so if it
    cannot."""
    return own_bytes if peers_bytes is None else min(own_bytes, peers_bytes)


def plan_of(reservation: Reservation) -> TransferPlan:
    """Raises LayoutMismatch when the reservation's numbers do not make a plan."""
    layout = reservation.layout
    return TransferPlan(
        nonce=reservation.nonce,
        num_tokens=reservation.num_tokens,
        first_block=reservation.attention_hit_tokens // layout.block_size,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        state_bytes=layout.state_bytes,
        max_message_bytes=reservation.max_message_bytes,
    )
