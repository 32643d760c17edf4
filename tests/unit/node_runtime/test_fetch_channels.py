"""How long a prefill node keeps a client for a decode node, without a node."""

import asyncio
from collections.abc import Coroutine

import pytest

from headrace.wire.messages import FetchReply, FetchRequest, FetchSource
from node_runtime.fetch_channels import IDLE_S, FetchChannels

GRACE_S = 5.0


class Client:
    def __init__(self) -> None:
        self.closed_with: list[float | None] = []

    async def fetch(self, request: FetchRequest, *, timeout_s: float) -> FetchReply:
        raise AssertionError("nobody fetches here")

    async def close(self, grace_s: float | None = None) -> None:
        self.closed_with.append(grace_s)


class World:
    """Its clock stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.opened: list[Client] = []
        self.channels = FetchChannels(self._connect, lambda: self.now_s, self._spawn, GRACE_S)

    def _connect(self, fetch_source: FetchSource) -> Client:
        self.opened.append(Client())
        return self.opened[-1]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run(work)


def fetch_source(address: str) -> FetchSource:
    return FetchSource("d0", address, 64, 16)


@pytest.fixture
def world() -> World:
    return World()


def test_a_source_in_use_keeps_one_client(world: World) -> None:
    for _ in range(5):
        world.channels.client(fetch_source("a:1"))
        world.now_s += IDLE_S
    assert [client.closed_with for client in world.opened] == [[]]


def test_the_client_of_a_source_that_left_is_closed_when_others_are_asked(world: World) -> None:
    """However it left: a restarted node has a new address, and nobody connects to the old one again."""
    for number in range(5):
        world.channels.client(fetch_source(f"a:{number}"))
        world.now_s += IDLE_S + 1
    assert [client.closed_with for client in world.opened] == [[GRACE_S]] * 4 + [[]]


def test_a_lost_source_is_disconnected_at_once_and_connected_anew(world: World) -> None:
    first = world.channels.client(fetch_source("a:1"))
    world.channels.disconnect("a:1")
    world.channels.disconnect("a:1")  # by another fetch with the same client
    assert world.opened[0].closed_with == [GRACE_S]
    assert world.channels.client(fetch_source("a:1")) is not first


def test_all_clients_close_with_the_node(world: World) -> None:
    world.channels.client(fetch_source("a:1"))
    world.channels.client(fetch_source("a:2"))
    asyncio.run(world.channels.close())
    assert [client.closed_with for client in world.opened] == [[None], [None]]
