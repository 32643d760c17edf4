"""A node's heartbeats to several routers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.wire import codecs
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.node_messages import NodeStatus, Peer, RegisterReply, Role
from headrace.wire.server import ControlServer
from node_runtime.registration import KnownPeers, Registrations
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import node_info, node_status

D0, D0_AGAIN, D1 = (
    Peer(name, incarnation, f"{name}:2", "cpu") for name, incarnation in (("d0", 1), ("d0", 2), ("d1", 1))
)


class FakeRouter(rpc.RegistryServicer):
    """Counts the heartbeats of each node; `hangs`: takes them and never answers."""

    def __init__(
        self, *peers: Peer, hangs: bool = False, heartbeat_s: float = 0.01, abandoned: tuple[str, ...] = ()
    ) -> None:
        self._abandoned = abandoned
        self._heartbeat_s = heartbeat_s
        self.beats: list[str] = []
        self.left: list[str] = []
        self._peers = peers
        self._hangs = hangs

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterReply:
        self.beats.append(request.info.name)
        if self._hangs:
            await asyncio.Event().wait()
        return codecs.encode(RegisterReply(self._heartbeat_s, self._peers, self._abandoned), pb.RegisterReply())

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        self.left.append(request.name)
        return pb.LeaveReply()


@asynccontextmanager
async def served(router: FakeRouter) -> AsyncIterator[str]:
    server = ControlServer(["Registry"], lambda it: rpc.add_RegistryServicer_to_server(router, it))
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def status() -> NodeStatus:
    return node_status()


def ignore(told: object) -> None:
    pass


@pytest.mark.parametrize("other", ["hangs", "is not there"])
async def test_a_router_that_is_lost_does_not_disturb_the_heartbeats_to_another(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_runtime.registration.CALL_TIMEOUT_S", PATIENCE_S)  # no second call within the test
    lost, router = FakeRouter(hangs=True), FakeRouter(D0)
    async with served(lost) as hanging, served(router) as address:
        met: list[list[Peer]] = []
        lost_address = hanging if other == "hangs" else "127.0.0.1:1"
        node = Registrations((lost_address, address), node_info("p0", Role.PREFILL), status, met.append, ignore, None)
        node.start()
        async with asyncio.timeout(PATIENCE_S):
            while len(router.beats) < 10:
                await asyncio.sleep(0.01)
        assert len(lost.beats) <= 1, "one call is open, and the other router's heartbeats did not wait for it"
        await node.stop(leave=True)
        assert met[-1] == [D0]
        assert router.left == ["p0"]


async def test_a_node_that_crashed_does_not_leave_for_its_return_is_worth_waiting_for() -> None:
    router = FakeRouter()
    async with served(router) as address:
        node = Registrations((address,), node_info("p0", Role.PREFILL), status, ignore, ignore, None)
        node.start()
        async with asyncio.timeout(PATIENCE_S):
            while not router.beats:
                await asyncio.sleep(0.01)
        await node.stop(leave=False)
        assert router.left == []


async def test_news_do_not_wait_for_the_next_heartbeat() -> None:
    router = FakeRouter(heartbeat_s=PATIENCE_S)
    async with served(router) as address:
        node = Registrations((address,), node_info("d0", Role.DECODE), status, ignore, ignore, None)
        node.start()
        async with asyncio.timeout(PATIENCE_S / 2):
            for count in (1, 2, 3):
                while len(router.beats) < count:
                    await asyncio.sleep(0.005)
                node.beat_now()
        await node.stop(leave=True)


async def test_orphans_that_a_router_needs_no_longer_are_passed_on() -> None:
    given_up: list[Sequence[str]] = []
    async with served(FakeRouter()) as silent, served(FakeRouter(abandoned=("a", "b"))) as address:
        node = Registrations((silent, address), node_info("d0", Role.DECODE), status, ignore, given_up.append, None)
        node.start()
        async with asyncio.timeout(PATIENCE_S):
            while not given_up:
                await asyncio.sleep(0.01)
        await node.stop(leave=True)
    assert set(given_up) == {("a", "b")}


def test_peers_of_all_routers_are_known() -> None:
    peers = KnownPeers()
    peers.answered("a", [D0])
    peers.answered("b", [D0, D1])
    assert peers.all == [D0, D1]


def test_the_incarnation_named_last_counts() -> None:
    peers = KnownPeers()
    peers.answered("b", [D0, D1])
    peers.answered("a", [D0_AGAIN])
    assert peers.all == [D0_AGAIN, D1]


def test_a_lost_router_names_no_peers_while_another_answers() -> None:
    peers = KnownPeers()
    peers.answered("a", [D1])
    peers.answered("b", [D0_AGAIN])
    peers.answered("a", [D0, D1])
    peers.lost("a")
    assert peers.all == [D0_AGAIN]
    peers.lost("b")
    assert peers.all == [D0, D1], "with no router left the links stay as they are"
    peers.answered("a", [D1])
    assert peers.all == [D1]
