"""A link is measured by real messages into a sink, or fails like any other send."""

import asyncio

import numpy as np
import pytest

from tests.support.patience import PATIENCE_S
from tests.support.transfer.inprocess import InProcessNetwork, InProcessTransport
from transfer.link import LONG_MESSAGES, ROUND_TRIPS, LinkSink, link_warning, measure_link
from transfer.protocol.errors import PeerUnreachable, TransferTimeout

BYTES = 1 << 20


def soon(seconds=PATIENCE_S):
    return asyncio.get_running_loop().time() + seconds


async def test_every_probe_is_really_received(monkeypatch):
    monkeypatch.setattr("transfer.link.LONG_S", 60.0)  # so that none is left out if the machine halts for a moment
    network = InProcessNetwork()
    here, there = InProcessTransport(network, "p0"), InProcessTransport(network, "d0")
    sink = np.zeros(BYTES, np.uint8)
    LinkSink(there, sink)
    report = await measure_link(here, "d0", np.full(BYTES, 7, np.uint8), soon())
    assert report.peer == "d0"
    assert report.round_trip_s > 0
    assert report.bytes_per_s > 0
    assert report.lanes == ("in-process",)
    assert (sink == 7).all()
    assert there.stats.received_parts == 2 + ROUND_TRIPS + 1 + LONG_MESSAGES
    assert there.stats.dropped_parts == 0


async def test_a_probe_that_does_not_fit_the_sink_is_dropped():
    network = InProcessNetwork()
    here, there = InProcessTransport(network, "p0"), InProcessTransport(network, "d0")
    sink = np.zeros(BYTES - 1, np.uint8)
    LinkSink(there, sink)
    await measure_link(here, "d0", np.full(BYTES, 7, np.uint8), soon())
    assert (sink[1 << 14 :] == 0).all()


class SlowLink(InProcessTransport):
    """Takes a while to take a long message."""

    def announce(self, arrival):
        asyncio.get_running_loop().call_later(0.2 if arrival.num_bytes == BYTES else 0, super().announce, arrival)


async def test_a_slow_link_is_measured_with_few_messages():
    network = InProcessNetwork()
    here, there = InProcessTransport(network, "p0"), SlowLink(network, "d0")
    LinkSink(there, np.zeros(BYTES, np.uint8))
    report = await measure_link(here, "d0", np.zeros(BYTES, np.uint8), soon())
    assert there.stats.received_parts == 2 + ROUND_TRIPS + 1 + 2
    assert report.bytes_per_s <= 2 * BYTES / 0.2


async def test_no_peer_and_no_answer_are_errors():
    network = InProcessNetwork()
    here, there = InProcessTransport(network, "p0"), InProcessTransport(network, "d0")

    class Silent:
        def announced(self, arrival):
            """Takes nothing."""

    there.expect((1 << 48) - 1, Silent())
    with pytest.raises(PeerUnreachable):
        await measure_link(here, "d1", np.zeros(BYTES, np.uint8), soon())
    with pytest.raises(TransferTimeout):
        await measure_link(here, "d0", np.zeros(BYTES, np.uint8), soon(0.05))


@pytest.mark.parametrize(
    ("lanes", "bytes_per_s", "between_gpus", "warning"),
    [
        (("tcp/lo",), 2e9, False, None),
        (("cuda_ipc/cuda", "tcp/eth0"), 230e9, True, None),
        (("rc_mlx5/mlx5_0:1",), 40e9, True, None),
        (("cuda_copy/cuda", "tcp/eth0"), 2e9, True, "go over cuda_copy/cuda, tcp/eth0, through host memory"),
        (("cuda_ipc/cuda", "tcp/eth0"), 0.5e9, True, "0.50 GB/s over cuda_ipc/cuda, tcp/eth0"),
        ((), 230e9, True, None),  # UCX did not tell, or not all; the figure does
        (("tcp/eth0",), 230e9, True, None),
        ((), 2e9, True, "2.00 GB/s over unknown lanes"),
    ],
)
def test_a_pair_of_gpus_that_does_without_nvlink_and_rdma_is_warned_of(lanes, bytes_per_s, between_gpus, warning):
    said = link_warning(lanes, bytes_per_s, between_gpus=between_gpus)
    assert said is None if warning is None else warning in said
