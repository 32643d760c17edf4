"""What a link really does: the round trip of a short message and the speed of long ones, at a node's start.

sink = LinkSink(transport, buffer)                                  # every node that receives
report = await measure_link(transport, peer, buffer, deadline_s)    # every pair, once
"""

import asyncio
import time
from dataclasses import dataclass

from transfer.backend import Arrival, Connection, Transport
from transfer.buffers import Buffer
from transfer.envelope import Tag
from transfer.plan import NONCE_BITS

LINK_NONCE = (1 << NONCE_BITS) - 1
"""The one nonce that is no session's. A session may draw it once in 2^48, and is then refused."""

SHORT_BYTES = 16 << 10
"""Long enough for a rendezvous, so that `sent` means `taken by the peer`: a round trip."""

ROUND_TRIPS = 20
LONG_MESSAGES = 8
SINK_PATIENCE_S = 86_400.0
"""A sink never gives up on a message by itself: it has one buffer, and nobody waits for that."""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """round_trip_s: median of a 16 KiB message, sent and taken; gigabytes_per_s: of buffer-sized messages."""

    peer: str
    round_trip_s: float
    gigabytes_per_s: float


class LinkSink:
    """Receives every probe into one buffer, over whatever was there."""

    def __init__(self, transport: Transport, buffer: Buffer) -> None:
        self._buffer = buffer
        transport.expect(LINK_NONCE, self)

    def announced(self, arrival: Arrival) -> None:
        if arrival.num_bytes > len(self._buffer):
            arrival.drop()
            return
        patience_s = asyncio.get_running_loop().time() + SINK_PATIENCE_S
        received = arrival.receive(self._buffer[: arrival.num_bytes], patience_s, None)
        received.add_done_callback(lambda done: done.exception())  # the prober hears of it


async def measure_link(transport: Transport, peer: str, buffer: Buffer, deadline_s: float) -> LinkReport:
    """Probe the sink at `peer` with messages of up to `buffer`'s size, which its own buffer must hold too.

    Raises `PeerUnreachable`, `PeerLost` or `DeadlinePassed`.
    """
    connection = await transport.connect(peer, deadline_s)
    short = buffer[:SHORT_BYTES]
    await _seconds(connection, short, deadline_s)  # the first message also wires the connection up
    await _seconds(connection, buffer, deadline_s)
    trips = sorted([await _seconds(connection, short, deadline_s) for _ in range(ROUND_TRIPS)])
    began_s = time.monotonic()
    for _ in range(LONG_MESSAGES):
        await _seconds(connection, buffer, deadline_s)
    seconds = time.monotonic() - began_s
    return LinkReport(peer, trips[ROUND_TRIPS // 2], LONG_MESSAGES * len(buffer) / seconds / 1e9)


async def _seconds(connection: Connection, part: Buffer, deadline_s: float) -> float:
    began_s = time.monotonic()
    await connection.send(Tag(LINK_NONCE, 0, True), part, deadline_s)
    return time.monotonic() - began_s
