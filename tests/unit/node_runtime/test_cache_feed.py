"""A node's cache updates over gRPC: an engine loop around a cache without tensors, a real server and client."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cache.journal import Journal
from headrace.engine.loop import EngineLoop
from headrace.right_of_way import RightOfWay
from headrace.wire.cache_updates import CacheChange, CacheChanges, CacheSnapshotPart, CacheUpdate
from headrace.wire.client import GrpcNodeClient
from headrace.wire.errors import NodeLost
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.server import ControlServer
from node_runtime.cache_feed import CacheFeed
from node_runtime.service import NodeService
from tests.support.cache.cache_node import FakeNode
from tests.support.patience import PATIENCE_S

INCARNATION = 2**63 + 5


class IdleEngine:
    """Never has a step to run; commands are run in its thread."""

    has_work = False
    host_share_s = math.inf
    spare_s = 0.0

    def __init__(self) -> None:
        self.right_of_way = RightOfWay()

    def next_deadline_s(self) -> None:
        return None

    def admit(self, within_s: float) -> None:
        pass

    def step(self) -> bool:
        return False


class Served:
    """A cache whose updates are served, and a client's way to it."""

    def __init__(self, max_events: int = 1000, max_keys: int = 4) -> None:
        self.journal = Journal(max_events)
        self.node = FakeNode(num_blocks=64, block_size=4, on_events=self.journal.record)
        engine: Any = IdleEngine()
        self.loop = EngineLoop(engine, asyncio.get_running_loop().time, lambda error: pytest.fail(str(error)))
        self.feed = CacheFeed(self.loop, self.journal, self.node.cache, INCARNATION, max_keys)
        node: Any = SimpleNamespace(cache_updates=self.feed.updates)
        service = NodeService(node)
        self.server = ControlServer(["Node"], lambda server: rpc.add_NodeServicer_to_server(service, server))

    async def start(self) -> None:
        self.loop.start()
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"

    async def stop(self) -> None:
        self.feed.close()
        await self.server.stop(5)
        await self.loop.stop(5)

    async def serve(self, tokens: range) -> None:
        await self.loop.call(lambda: self.node.serve(tokens))

    async def contents(self) -> tuple[set[bytes], set[bytes]]:
        held = await self.loop.call(self.node.cache.contents)
        return set(held.blocks), set(held.checkpoints)


@pytest.fixture
async def undo() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        yield stack


async def start(undo: AsyncExitStack, **settings: int) -> tuple[Served, GrpcNodeClient]:
    served = Served(**settings)
    await served.start()
    undo.push_async_callback(served.stop)
    client = GrpcNodeClient("n0", served.address)
    undo.push_async_callback(client.close)
    return served, client


async def snapshot(updates: AsyncIterator[CacheUpdate]) -> list[CacheSnapshotPart]:
    parts: list[CacheSnapshotPart] = []
    while not parts or not parts[-1].is_last:
        part = await anext(updates)
        assert isinstance(part, CacheSnapshotPart) and part.incarnation == INCARNATION
        parts.append(part)
    return parts


async def test_a_late_joiner_gets_a_snapshot_in_bounded_parts_then_what_changes(undo: AsyncExitStack) -> None:
    served, client = await start(undo)
    for first in range(0, 300, 100):
        await served.serve(range(first, first + 17))
    async with client.cache_updates() as call:
        updates = aiter(call)
        parts = await snapshot(updates)
        assert len(parts) == 3 and max(len(part.blocks) for part in parts) == 4
        blocks = {key for part in parts for key in part.blocks}
        assert (blocks, {key for part in parts for key in part.checkpoints}) == await served.contents()
        assert {part.sequence for part in parts} == {served.journal.sequence}

        await served.serve(range(300, 309))  # two blocks, a checkpoint at the second
        update = await anext(updates)
        assert isinstance(update, CacheChanges) and update.incarnation == INCARNATION
        assert update.first_sequence == parts[0].sequence + 1
        stored = CacheChange.BLOCK_STORED
        assert [kind for kind, _ in update.changes] == [stored, stored, CacheChange.CHECKPOINT_STORED]
        assert {key for _, key in update.changes} == (await served.contents())[0] - blocks


async def test_an_empty_cache_has_a_snapshot_too(undo: AsyncExitStack) -> None:
    _, client = await start(undo)
    async with client.cache_updates() as call:
        assert await snapshot(aiter(call)) == [CacheSnapshotPart(INCARNATION, 0, (), (), True)]


async def test_one_that_falls_behind_gets_a_snapshot_again(undo: AsyncExitStack) -> None:
    served, client = await start(undo, max_events=4, max_keys=100)
    async with client.cache_updates() as call:
        updates = aiter(call)
        await snapshot(updates)

        def burst() -> None:
            for first in range(0, 500, 100):
                served.node.serve(range(first, first + 17))

        await served.loop.call(burst)
        (part,) = await snapshot(updates)
        assert (set(part.blocks), set(part.checkpoints)) == await served.contents()
        assert part.sequence == served.journal.sequence


async def test_one_that_leaves_is_forgotten(undo: AsyncExitStack) -> None:
    served, client = await start(undo)
    async with client.cache_updates() as call:
        await snapshot(aiter(call))
        assert len(served.journal._readers) == 1
    while served.journal._readers:
        await asyncio.sleep(0.01)
    await served.serve(range(17))
    assert len(served.journal._recent) == 0


async def test_a_node_that_stops_ends_the_stream_at_once(undo: AsyncExitStack) -> None:
    served, client = await start(undo)
    async with client.cache_updates() as call:
        updates = aiter(call)
        await snapshot(updates)
        served.feed.close()
        with pytest.raises(StopAsyncIteration):
            await anext(updates)


async def test_a_node_that_is_not_there_is_lost() -> None:
    client = GrpcNodeClient("n0", "127.0.0.1:1")
    with pytest.raises(NodeLost):
        async with client.cache_updates() as call:
            await anext(aiter(call))
    await client.close()
