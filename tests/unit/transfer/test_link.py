"""A link is measured by real messages into a sink, or fails like any other send."""

import asyncio

import numpy as np
import pytest

from transfer.buffers import allocate_host
from transfer.errors import DeadlinePassed, PeerUnreachable
from transfer.inprocess import InProcessNetwork, InProcessTransport
from transfer.link import LONG_MESSAGES, ROUND_TRIPS, LinkSink, measure_link

BYTES = 1 << 20


def soon(seconds=5):
    return asyncio.get_running_loop().time() + seconds


async def test_every_probe_is_really_received():
    network = InProcessNetwork()
    here, there = InProcessTransport(network, "p0"), InProcessTransport(network, "d0")
    sink = allocate_host(BYTES)
    LinkSink(there, sink)
    report = await measure_link(here, "d0", np.full(BYTES, 7, np.uint8), soon())
    assert report.peer == "d0"
    assert report.round_trip_s > 0
    assert report.gigabytes_per_s > 0
    assert (sink == 7).all()
    assert there.stats.received_parts == ROUND_TRIPS + LONG_MESSAGES + 2
    assert there.stats.dropped_parts == 0


async def test_a_probe_that_does_not_fit_the_sink_is_dropped():
    network = InProcessNetwork()
    here, there = InProcessTransport(network, "p0"), InProcessTransport(network, "d0")
    sink = allocate_host(BYTES - 1)
    LinkSink(there, sink)
    await measure_link(here, "d0", np.full(BYTES, 7, np.uint8), soon())
    assert (sink[1 << 14 :] == 0).all()


async def test_no_peer_and_no_answer_are_errors():
    network = InProcessNetwork()
    here, there = InProcessTransport(network, "p0"), InProcessTransport(network, "d0")

    class Silent:
        def announced(self, arrival):
            """Takes nothing."""

    there.expect((1 << 48) - 1, Silent())
    with pytest.raises(PeerUnreachable):
        await measure_link(here, "d1", allocate_host(BYTES), soon())
    with pytest.raises(DeadlinePassed):
        await measure_link(here, "d0", allocate_host(BYTES), soon(0.05))
