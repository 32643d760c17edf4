"""Strangers that reach a node's keepalive server and UCX listener: they harm no connection but their own."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.transfer.transfer_peer import Peer, two
from transfer.backend import Arrival
from transfer.buffers import Buffer
from transfer.protocol.envelope import Tag
from transfer.protocol.errors import ConnectionLost, PeerUnreachable
from transfer.protocol.plan import TransferPlan
from transfer.ucx import UcxConfig, open_transport
from transfer.ucx.keepalive import ID_BYTES, Keepalive

pytestmark = pytest.mark.slow  # bounds times that other work on the machine would stretch

if TYPE_CHECKING:
    from transfer.ucx.endpoint import Endpoint, UcxConnection
    from transfer.ucx.transport import UcxTransport

NONCE = 7
STALL_S = 3.0


def soon(within_s: float = 10.0) -> float:
    return asyncio.get_running_loop().time() + within_s


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


class Listener:
    def __init__(self) -> None:
        self.arrived: list[Arrival] = []

    def announced(self, arrival: Arrival) -> None:
        self.arrived.append(arrival)


@asynccontextmanager
async def transports(count: int) -> AsyncIterator["list[UcxTransport]"]:
    async with AsyncExitStack() as undo:
        opened = [open_transport(UcxConfig()) for _ in range(count)]
        for transport in opened:
            undo.push_async_callback(transport.close)
        yield opened


async def arrives_whole(connection: "UcxConnection", listener: Listener) -> None:
    """Sends the listener's first message at once, and receives it."""
    part = np.arange(100_000, dtype=np.uint8)
    sent = connection.send(Tag(NONCE, 0, True), part, soon())
    await until(lambda: len(listener.arrived) == 1)
    received = np.zeros_like(part)
    await listener.arrived[0].receive(received, soon(), connection.id)
    await sent
    assert (received == part).all()


async def test_a_connection_keeps_its_id_whoever_else_claims_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the keepalive server, and behind it: a stranger accepted under an id of its own sends another over UCX."""
    async with transports(3) as (node, peer, stranger):
        listener, lost = Listener(), list[str]()
        node.expect(NONCE, listener)
        connection = await peer.connect(node.address, soon())
        node.watch(connection.id, lost.append)

        monkeypatch.setattr("secrets.randbits", lambda bits: connection.id)
        with pytest.raises(PeerUnreachable, match="it closed the connection"):
            await stranger.connect(node.address, soon())

        host, _, port = node.address.rpartition(":")
        keepalive, listener_port = await Keepalive.connect(host, int(port), connection.id ^ 1, silence_s=1.0)
        forged = stranger._endpoint_to(keepalive.peer_host, listener_port, connection.id)
        id_bytes = np.frombuffer(connection.id.to_bytes(ID_BYTES), np.uint8)
        await stranger._move_id(forged, forged.ucx_endpoint.stream_send, id_bytes)
        await until(lambda: forged.lost is not None)

        await arrives_whole(connection, listener)
        assert lost == []


async def test_a_connection_lost_with_its_id_is_not_kept_for_the_next_session() -> None:
    async with transports(2) as (node, peer):
        move_id = peer._move_id

        async def move_id_and_lose(endpoint: "Endpoint", post: Callable[..., object], id_bytes: Buffer) -> None:
            await move_id(endpoint, post, id_bytes)
            endpoint.lose("it broke in this very turn")

        vars(peer)["_move_id"] = move_id_and_lose
        with pytest.raises(PeerUnreachable, match="in this very turn"):
            await peer.connect(node.address, soon())
        del vars(peer)["_move_id"]
        connection = await peer.connect(node.address, soon())
        assert connection.lost is None
        assert peer.stats.connections_opened == 1


def identify_late(node: "UcxTransport", delay_s: float) -> None:
    """A node as busy as that between the id's arrival and its turn."""
    loop, identify = asyncio.get_running_loop(), node._identify
    vars(node)["_identify"] = lambda *arrived: loop.call_later(delay_s, identify, *arrived)


async def test_the_first_message_of_a_connection_comes_when_its_receiver_knows_it() -> None:
    async with transports(2) as (node, peer):
        identify_late(node, 0.2)
        listener = Listener()
        node.expect(NONCE, listener)
        await arrives_whole(await peer.connect(node.address, soon()), listener)


async def test_a_peer_that_does_not_confirm_the_connection_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with transports(2) as (node, peer):
        monkeypatch.setattr("transfer.ucx.transport.ID_TIMEOUT_S", 2.0)
        identify_late(node, 60.0)
        with pytest.raises(PeerUnreachable, match=r"did not confirm the connection in 2 s"):
            await peer.connect(node.address, soon())
        assert f"to {node.address}" not in peer.describe()
        unidentified = len(node._unidentified)
        connecting = asyncio.create_task(peer.connect(node.address, soon()))
        await until(lambda: len(node._unidentified) > unidentified)
        await peer.close()
        with pytest.raises(asyncio.CancelledError):
            await connecting


async def test_a_payload_for_a_connection_that_is_not_there_is_refused_at_once() -> None:
    async with transports(2) as (node, peer):
        listener = Listener()
        node.expect(NONCE, listener)
        connection = await peer.connect(node.address, soon())
        sent = connection.send(Tag(NONCE, 0, True), np.zeros(100_000, np.uint8), soon())
        await until(lambda: len(listener.arrived) == 1)
        with pytest.raises(ConnectionLost, match="not, or no longer, known"):
            await listener.arrived[0].receive(np.zeros(100_000, np.uint8), soon(), connection.id ^ 1)
        await sent  # it was dropped
        assert node.stats.dropped_parts == 1
        assert connection.lost is None


def plan(nonce: int, mib: int) -> TransferPlan:
    return TransferPlan(
        nonce=nonce, num_tokens=16 * mib, first_block=0, block_size=16, block_bytes=1 << 20, state_bytes=1 << 20,
        max_message_bytes=1 << 20,
    )  # fmt: skip


async def test_a_stranger_that_stalls_an_envelope_costs_nobody_else_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows a nonce, has UCX announce the envelope instead of sending it along, and stops. The deadline of the
    session that was to have it passes while another session's messages come in."""
    async with two(Peer.start(), Peer.start()) as (receiver, sender):
        monkeypatch.setenv("UCX_RNDV_THRESH", "0")
        async with Peer.start() as stranger:
            stalled = await receiver.expect(plan(1, 1), STALL_S)
            landed = await receiver.expect(plan(2, 64))
            sent = sender.send(plan(2, 64), receiver, tokens=16 * 32)
            await receiver.heard("landed", 31)
            await stranger.send(plan(3, 1), receiver)  # nobody expects it: it is connected now
            os.kill(receiver.process.pid, signal.SIGSTOP)
            stranger.send(plan(1, 1), receiver)
            await asyncio.sleep(0.5)  # its announcement is in the receiver's socket
            os.kill(stranger.process.pid, signal.SIGSTOP)
            os.kill(receiver.process.pid, signal.SIGCONT)
            began_s = time.monotonic()
            assert (await stalled)["failed"] == "deadline"
            assert time.monotonic() - began_s < STALL_S
            later = await receiver.expect(plan(4, 1))
            await sender.send(plan(4, 1), receiver)
            assert (await later)["wrong"] == 0
            assert not landed.done() and not sent.done()
            assert (await sender.report())["connections_lost"] == 0
