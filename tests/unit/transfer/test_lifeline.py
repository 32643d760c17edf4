"""Lifelines between sockets of this process: who is taken in at a door, and what each end learns of the other's end."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvloop

from transfer.ucx.lifeline import BEAT_S, Door, reach

ID = 0x1234_5678_9ABC_DEF0
LISTENER_PORT = 4711


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door("127.0.0.1", 0, LISTENER_PORT, silence_s=1.0)
    yield door
    await door.close()


async def test_who_names_an_id_learns_the_listeners_port_and_has_the_id(door: Door) -> None:
    lifeline, port = await reach("127.0.0.1", door.port, ID, 1.0)
    assert port == LISTENER_PORT
    assert door.lifeline(ID) is not None and door.lifeline(ID + 1) is None
    with pytest.raises(ConnectionError, match="hung up"):
        await reach("127.0.0.1", door.port, ID, 1.0)
    assert not lifeline.ended.done()
    lifeline.close()


async def test_the_end_of_one_end_is_the_others_and_frees_the_id(door: Door) -> None:
    lifeline, _ = await reach("127.0.0.1", door.port, ID, 1.0)
    other = door.lifeline(ID)
    assert other is not None
    lifeline.close()
    async with asyncio.timeout(5):
        assert await lifeline.ended is None
        assert await other.ended is None, "an orderly end is UCX's to tell of"
    again, _ = await reach("127.0.0.1", door.port, ID, 1.0)
    assert door.lifeline(ID) not in (None, other)
    again.close()


async def test_beats_are_no_greeting(door: Door) -> None:
    lifeline, _ = await reach("127.0.0.1", door.port, ID, 1.0)
    await asyncio.sleep(3 * BEAT_S)  # a few of them, both ways
    other = door.lifeline(ID)
    assert other is not None
    assert not lifeline.ended.done() and not other.ended.done()
    assert lifeline.greeting.result() == LISTENER_PORT.to_bytes(2)
    lifeline.close()


async def test_nobody_and_somebody_who_says_nothing_raise() -> None:
    silent = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(ConnectionError):
        await reach("127.0.0.1", port, ID, 1.0)
    silent.close()
    await silent.wait_closed()
    with pytest.raises(OSError):
        await reach("127.0.0.1", port, ID, 1.0)


async def test_a_port_that_is_taken_is_said(door: Door) -> None:
    with pytest.raises(OSError, match="in use"):
        Door("127.0.0.1", door.port, LISTENER_PORT, silence_s=1.0)


def test_a_node_of_ray_runs_in_uvloop() -> None:
    async def greeted() -> int:
        door = Door("127.0.0.1", 0, LISTENER_PORT, silence_s=1.0)
        async with asyncio.timeout(5):
            lifeline, port = await reach("127.0.0.1", door.port, ID, 1.0)
            lifeline.close()
            await door.close()
        return port

    assert uvloop.run(greeted()) == LISTENER_PORT
