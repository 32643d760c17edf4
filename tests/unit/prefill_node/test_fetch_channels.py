"""How long a prefill node keeps a line to a decode node, without a node."""

import asyncio
from collections.abc import Coroutine

import pytest

from headrace.wire.messages import FetchReply, FetchRequest, FetchSource
from prefill_node.fetch_channels import IDLE_S, FetchChannels

GRACE_S = 5.0


class Line:
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
        self.opened: list[Line] = []
        self.lines = FetchChannels(self._connect, lambda: self.now_s, self._spawn, GRACE_S)

    def _connect(self, fetch_source: FetchSource) -> Line:
        self.opened.append(Line())
        return self.opened[-1]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run(work)


def fetch_source(address: str) -> FetchSource:
    return FetchSource("d0", address, 64, 16)


@pytest.fixture
def world() -> World:
    return World()


def test_a_source_in_use_keeps_one_line(world: World) -> None:
    for _ in range(5):
        world.lines.to(fetch_source("a:1"))
        world.now_s += IDLE_S
    assert [line.closed_with for line in world.opened] == [[]]


def test_the_line_of_a_source_that_left_is_closed_when_others_are_asked(world: World) -> None:
    """However it left: a restarted node has a new address, and nobody will call the old one again."""
    for number in range(5):
        world.lines.to(fetch_source(f"a:{number}"))
        world.now_s += IDLE_S + 1
    assert [line.closed_with for line in world.opened] == [[GRACE_S]] * 4 + [[]]


def test_a_lost_source_is_hung_up_at_once_and_called_anew(world: World) -> None:
    first = world.lines.to(fetch_source("a:1"))
    world.lines.disconnect("a:1")
    world.lines.disconnect("a:1")  # by another fetch over the same line
    assert world.opened[0].closed_with == [GRACE_S]
    assert world.lines.to(fetch_source("a:1")) is not first


def test_all_lines_end_with_the_node(world: World) -> None:
    world.lines.to(fetch_source("a:1"))
    world.lines.to(fetch_source("a:2"))
    asyncio.run(world.lines.close())
    assert [line.closed_with for line in world.opened] == [[None], [None]]
