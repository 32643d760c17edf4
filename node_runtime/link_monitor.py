"""Measures a node's links to its peers in the background; heartbeats report the results.

The router's answer to each heartbeat names the peers. New and restarted peers, and those whose connection was lost, are
measured one after the other; a measurement takes a tenth of a second, and nothing waits for it. From then on the
hand-overs and fetches that are sent over a link correct its speed: they share it, and pack what they send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from headrace.wire.node_messages import LinkStatus, Peer, transfer_refusal
from node_runtime.measured_rate import MeasuredRate
from transfer.backend import Transport
from transfer.buffers import StagingMemory
from transfer.link import PROBE_BYTES, LinkReport, LinkSink, link_warning, measure_link
from transfer.protocol.stats import TransferTotals

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 30.0
"""A probe that takes longer breaks the connection: only a peer that has long stopped answering takes longer."""

RETRY_S = 2.0

LEAST_BYTES = 1 << 20
"""Sent in fewer bytes, sessions show the time of a message and not the speed of the link."""


class _Link:
    """One peer and its last status.

    is_due_s   when to measure next; None: it has been measured
    speed      in bytes a second, once it has been measured
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.status = LinkStatus(peer.name)
        self.is_due_s: float | None = 0.0
        self.speed: MeasuredRate | None = None
        self.stop_watching: Callable[[], None] = lambda: None

    def sent(self, totals: TransferTotals) -> None:
        """Takes sessions into account that were sent over the link since the last call."""
        num_bytes = totals.attention_bytes + totals.state_bytes
        if self.speed is not None and num_bytes >= LEAST_BYTES:
            self.speed.observe(num_bytes, totals.attention_seconds + totals.state_seconds)
            self.status = replace(self.status, bytes_per_s=self.speed.value)


class LinkMonitor:
    """Runs in one event loop. Measures with buffers of `memory`, on `device`, as transfers use them."""

    def __init__(self, name: str, transport: Transport, memory: StagingMemory, device: str) -> None:
        self._name = name
        self._transport = transport
        self._device = device
        self._links: dict[Peer, _Link] = {}
        self._news = asyncio.Event()
        # Never freed: a GPU stands still to free memory.
        sink, self._probe = (buffer.whole for buffer in memory.allocate(2, PROBE_BYTES))
        LinkSink(transport, sink)
        self._task = asyncio.create_task(self._check_those_due())

    def meet(self, peers: Sequence[Peer]) -> None:
        """Sets the peers; measures those not measured yet, or not since their connection was lost."""
        for gone in self._links.keys() - set(peers):
            self._links.pop(gone).stop_watching()
        for peer in peers:
            if peer not in self._links:
                self._links[peer] = _Link(peer)
        self._news.set()

    def report(self) -> tuple[LinkStatus, ...]:
        """The links as they are known now, with what was sent since the last report."""
        sent, self._transport.stats.sent_to = self._transport.stats.sent_to, {}
        for peer, link in self._links.items():
            if (totals := sent.get(peer.transfer_address)) is not None:
                link.sent(totals)
        return tuple(link.status for _, link in sorted(self._links.items(), key=lambda each: each[0].name))

    def bytes_per_s(self, name: str) -> float | None:
        """The speed of the link to a peer; None: not known, or the link is broken."""
        return next((link.status.bytes_per_s for peer, link in self._links.items() if peer.name == name), None)

    async def close(self) -> None:
        """Stops measuring. A probe in flight ends with the transport."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _check_those_due(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await self._news.wait()
            self._news.clear()
            for link in list(self._links.values()):
                if link.is_due_s is not None and link.is_due_s <= clock():
                    await self._check(link)

    async def _check(self, link: _Link) -> None:
        refusal = transfer_refusal(self._device, link.peer.device)
        if refusal is not None:
            self._failed(link, refusal, logging.WARNING)
            return
        now_s = asyncio.get_running_loop().time()
        try:
            address, deadline_s = link.peer.transfer_address, now_s + CHECK_TIMEOUT_S
            report = await measure_link(self._transport, address, self._probe, deadline_s)
            connection = await self._transport.connect(address, deadline_s)
        except Exception as error:  # of any kind: transfers notice it themselves, and the other links are still due
            self._failed(link, str(error) or repr(error))
            return
        if self._links.get(link.peer) is not link:
            return  # it left meanwhile
        link.is_due_s = None
        link.status = self._measured(link.peer, report)
        link.speed = MeasuredRate.starting_at(report.bytes_per_s)
        link.stop_watching = connection.watch(lambda reason: self._failed(link, f"lost: {reason}"))

    def _measured(self, peer: Peer, report: LinkReport) -> LinkStatus:
        between_gpus = self._device == peer.device == "cuda"
        warning = link_warning(report.lanes, report.bytes_per_s, between_gpus=between_gpus)
        log.info(
            "link %s -> %s: %.2f GB/s, round trip %.0f us over %s",
            self._name, peer.name, report.bytes_per_s / 1e9, report.round_trip_s * 1e6, ", ".join(report.lanes),
        )  # fmt: skip
        if warning is not None:
            log.warning("link %s -> %s: %s", self._name, peer.name, warning)
        return LinkStatus(peer.name, report.lanes, report.round_trip_s, report.bytes_per_s, warning)

    def _failed(self, link: _Link, error: str, level: int = logging.INFO) -> None:
        if self._links.get(link.peer) is link and link.status.error != error:
            log.log(level, "link %s -> %s: %s", self._name, link.peer.name, error)
        link.status, link.speed = LinkStatus(link.peer.name, error=error), None
        link.is_due_s = asyncio.get_running_loop().time() + RETRY_S
