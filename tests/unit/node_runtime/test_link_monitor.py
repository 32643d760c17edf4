"""A node measures its links in the background, and again when it has to."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from headrace.wire.node_messages import LinkStatus, Peer
from node_runtime import link_monitor
from node_runtime.link_monitor import LinkMonitor
from tests.support.patience import PATIENCE_S
from tests.support.transfer.inprocess import InProcessNetwork, InProcessTransport
from transfer.buffers import HostMemory
from transfer.protocol.stats import TransferStats, TransferTotals

D0 = Peer("d0", 1, "d0:2", "cpu")
D1 = Peer("d1", 1, "d1:2", "cpu")


@pytest.fixture(autouse=True)
def small_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of a size for which nothing waits, as many at any speed; a lost link is due at the next heartbeat."""
    monkeypatch.setattr(link_monitor, "PROBE_BYTES", 1 << 16)
    monkeypatch.setattr("transfer.link.LONG_S", 60.0)
    monkeypatch.setattr(link_monitor, "RETRY_S", 0.0)


class Network:
    """Transports by address, and the links of p0."""

    def __init__(self, device: str = "cpu") -> None:
        self._network = InProcessNetwork()
        self.p0 = InProcessTransport(self._network, "p0:2")
        self.links = LinkMonitor("p0", self.p0, HostMemory(), device)
        self._others: list[LinkMonitor] = []

    def start(self, address: str, lanes: tuple[str, ...] = ("in-process",)) -> InProcessTransport:
        transport = InProcessTransport(self._network, address)
        self._others.append(LinkMonitor(address, transport, HostMemory(), "cpu"))
        return transport

    async def until_told(self, *peers: Peer, wanted: str) -> tuple[LinkStatus, ...]:
        """Heartbeats until every link of these peers is measured, or none is: by the name of a field."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.links.meet(peers)
                await asyncio.sleep(0)
                report = self.links.report()
                if all(getattr(status, wanted) is not None for status in report):
                    return report

    async def close(self) -> None:
        for each in (self.links, *self._others):
            await each.close()


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    network = Network()
    yield network
    await network.close()


async def test_every_peer_is_measured_once_however_many_heartbeats_name_it(network: Network) -> None:
    transports = [network.start(peer.transfer_address) for peer in (D0, D1)]
    first, second = await network.until_told(D0, D1, wanted="bytes_per_s")
    assert (first.peer, second.peer) == ("d0", "d1")
    assert first.lanes == ("in-process",) and first.warning is None and first.error is None
    received = [transport.stats.received_parts for transport in transports]
    for _ in range(20):
        network.links.meet([D0, D1])
        await asyncio.sleep(0)
    assert [transport.stats.received_parts for transport in transports] == received


async def test_a_peer_that_cannot_be_reached_keeps_no_other_from_being_measured(network: Network) -> None:
    network.start(D1.transfer_address)
    async with asyncio.timeout(PATIENCE_S):
        while network.links.report()[-1:] == () or network.links.report()[1].bytes_per_s is None:
            network.links.meet([D0, D1])
            await asyncio.sleep(0)
    assert "nobody is at 'd0:2'" in (network.links.report()[0].error or "")
    network.start(D0.transfer_address)
    assert all(status.error is None for status in await network.until_told(D0, D1, wanted="bytes_per_s"))


async def test_a_lost_link_is_an_error_until_it_is_measured_again(network: Network) -> None:
    before = network.start(D0.transfer_address)
    await network.until_told(D0, wanted="bytes_per_s")
    await before.close()
    (lost,) = network.links.report()
    assert lost.bytes_per_s is None and "lost: d0:2 closed" in (lost.error or "")
    after = network.start(D0.transfer_address)
    (found,) = await network.until_told(D0, wanted="bytes_per_s")
    assert found.error is None
    assert after.stats.received_parts == before.stats.received_parts


async def test_what_is_sent_over_a_link_corrects_its_speed(network: Network) -> None:
    network.start(D0.transfer_address)
    (before,) = await network.until_told(D0, wanted="bytes_per_s")

    def sent(num_bytes: int, seconds: float, address: str = D0.transfer_address) -> float:
        stats = TransferStats(0, num_bytes - 100, 100, 3, 9.0, seconds / 2, seconds / 2, 0.0)
        network.p0.stats.sent_to.setdefault(address, TransferTotals()).add(stats)
        (link,) = network.links.report()
        return link.bytes_per_s

    assert sent(1000, 1.0) == before.bytes_per_s, "a few bytes show no speed"
    assert sent(1 << 30, 1.0, "another:2") == before.bytes_per_s
    for _ in range(60):
        speed = sent(50_000_000, 0.5)
    assert speed == pytest.approx(100e6, rel=0.01)
    assert network.p0.stats.sent_to == {}
    (after,) = network.links.report()
    assert replace(after, bytes_per_s=before.bytes_per_s) == before


async def test_a_restarted_peer_is_another_and_one_that_left_is_forgotten(network: Network) -> None:
    network.start(D0.transfer_address)
    await network.until_told(D0, wanted="bytes_per_s")
    restarted = Peer("d0", 2, "d0:3", "cpu")
    again = network.start(restarted.transfer_address)
    network.links.meet([restarted])
    assert network.links.report() == (LinkStatus("d0"),)  # nothing is said of it that was another's
    await network.until_told(restarted, wanted="bytes_per_s")
    assert again.stats.received_parts > 0
    network.links.meet([])
    assert network.links.report() == ()


async def test_two_gpus_that_hand_over_by_tcp_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.transfer.inprocess.InProcessConnection.lanes", ("cuda_copy/cuda", "tcp/eth0"))
    network = Network(device="cuda")
    network.start(D1.transfer_address)
    with caplog.at_level(logging.WARNING):
        [gpu] = await network.until_told(Peer("d1", 1, "d1:2", "cuda"), wanted="bytes_per_s")
    assert "go over cuda_copy/cuda, tcp/eth0" in (gpu.warning or "")
    assert [record.message for record in caplog.records] == [f"link p0 -> d1: {gpu.warning}"]
    await network.close()


async def test_a_gpu_and_a_host_are_refused_and_neither_is_probed(caplog: pytest.LogCaptureFixture) -> None:
    network = Network(device="cuda")
    host = network.start(D0.transfer_address)
    with caplog.at_level(logging.WARNING):
        [status] = await network.until_told(D0, wanted="error")
        await network.until_told(D0, wanted="error")
    assert "run prefill and decode nodes on one kind of device" in (status.error or "")
    assert [record.message for record in caplog.records] == [f"link p0 -> d0: {status.error}"]
    assert host.stats.received_parts == 0
    await network.close()


async def test_closing_waits_for_no_measurement(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_monitor, "CHECK_TIMEOUT_S", 2 * PATIENCE_S)
    silent = InProcessTransport(network._network, D0.transfer_address)

    class Silent:
        def announced(self, arrival: object) -> None:
            """Takes nothing."""

    silent.expect((1 << 48) - 1, Silent())
    network.links.meet([D0])
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await network.links.close()
    assert network.links.report() == (LinkStatus("d0"),)
