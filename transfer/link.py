"""Link measurement: the transports in use, the time of a short message, and the speed of long ones.

    sink = LinkSink(transport, buffer)                                 # every node: any node may measure its link to it
    report = await measure_link(transport, peer, buffer, deadline_s)   # every pair, in each direction used

A measurement shares the connection with transfers, so it is short: a tenth of a second, or one long message.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from transfer.backend import Arrival, Transport
from transfer.buffers import Buffer
from transfer.protocol.envelope import Tag
from transfer.protocol.plan import NONCE_BITS

LINK_NONCE = (1 << NONCE_BITS) - 1
"""The nonce of probes. A session draws it once in 2^48 times, and is then refused."""

PROBE_BYTES = 16 << 20
"""A long message, and every sink's buffer: long enough that starting it costs little on a link of 200 GB/s."""

SHORT_BYTES = 16 << 10
"""A short message: long enough for a rendezvous, so that it is sent when the peer has taken it, a round trip."""

ROUND_TRIPS = 20
LONG_MESSAGES = 16
LONG_S = 0.1
"""Time for all long messages: on a slow link there are fewer of them."""

SINK_PATIENCE_S = 86_400.0
"""A sink practically never gives up on a message: it has one buffer, and nobody waits for that."""

DIRECT_TRANSPORTS = ("cuda_ipc", "rc", "dc", "ud", "gga", "srd")
"""Prefixes of the UCX transports that move GPU memory without host memory: NVLink or PCIe, RDMA."""

SLOW_BYTES_PER_S = 5e9
"""Less than this between two GPUs means that the bytes pass through host memory, whatever the lanes are."""

FAST_BYTES_PER_S = 20e9
"""More than this no path through host memory and TCP reaches, whatever the lanes are."""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One measurement of the link to a peer.

    lanes          in use, such as `tcp/eth0`
    round_trip_s   median time until a message of 16 KiB is taken
    bytes_per_s    of long messages, two in flight at a time
    """

    peer: str
    lanes: tuple[str, ...]
    round_trip_s: float
    bytes_per_s: float


class LinkSink:
    """Receives every probe into one buffer and ignores its contents."""

    def __init__(self, transport: Transport, buffer: Buffer) -> None:
        self._buffer = buffer
        self._stats = transport.stats
        transport.expect(LINK_NONCE, self)

    def announced(self, arrival: Arrival) -> None:
        if arrival.num_bytes > len(self._buffer):
            arrival.drop()
            return
        patience_s = asyncio.get_running_loop().time() + SINK_PATIENCE_S
        self._stats.probe_received_bytes += arrival.num_bytes
        received = arrival.receive(self._buffer[: arrival.num_bytes], patience_s, None)
        received.add_done_callback(lambda done: done.exception())  # the measuring end gets the error


async def measure_link(transport: Transport, peer: str, buffer: Buffer, deadline_s: float) -> LinkReport:
    """Sends messages of up to `buffer`'s size to the sink at `peer`, whose own buffer must hold them too.

    deadline_s   leave time to spare: a message that outlives it breaks the connection, which transfers share
    Raises `PeerUnreachable`, `ConnectionLost` or `TransferTimeout`.
    """
    connection = await transport.connect(peer, deadline_s)

    async def seconds_of(part: Buffer) -> float:
        began_s = time.monotonic()
        transport.stats.probe_sent_bytes += len(part)
        # Shielded: the transport owns the part until it is done, even if the measurement is cancelled.
        await asyncio.shield(connection.send(Tag(LINK_NONCE, 0, True), part, deadline_s))
        return time.monotonic() - began_s

    short = buffer[:SHORT_BYTES]
    await seconds_of(short)  # the first messages also set up the connection
    await seconds_of(buffer)
    trips = sorted([await seconds_of(short) for _ in range(ROUND_TRIPS)])
    pairs = max(1, min(LONG_MESSAGES, int(LONG_S / await seconds_of(buffer))) // 2)
    began_s = time.monotonic()
    for _ in range(pairs):
        await asyncio.gather(seconds_of(buffer), seconds_of(buffer))
    seconds = time.monotonic() - began_s
    return LinkReport(peer, connection.lanes, trips[ROUND_TRIPS // 2], 2 * pairs * len(buffer) / seconds)


def link_warning(lanes: Sequence[str], bytes_per_s: float, *, between_gpus: bool) -> str | None:
    """A warning for the operator about a slow link between GPUs; None when there is nothing to report."""
    if not between_gpus or bytes_per_s > FAST_BYTES_PER_S:
        return None
    used = ", ".join(lanes) or "unknown lanes"
    if lanes and not any(lane.startswith(DIRECT_TRANSPORTS) for lane in lanes):
        return f"transfers between two GPUs go over {used}, through host memory; see docs/operations.md, Links"
    if bytes_per_s < SLOW_BYTES_PER_S:
        return (
            f"a pair of GPUs at {bytes_per_s / 1e9:.2f} GB/s over {used}: its bytes pass through the hosts' memory; "
            "see docs/operations.md, Links"
        )
    return None
