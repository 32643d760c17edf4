"""Following a node's cache: the engine's pause, the snapshot's way, the router's memory, a lookup.

    python -m benchmarks cache-updates [--blocks 1000000]

A node process holds one prompt of that many blocks; this process follows it as a router does.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headrace.cache.events import CacheContents
from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import ResumeLocally
from headrace.cache.journal import Journal, Reader
from headrace.cache.prefix_cache import PrefixCache
from headrace.engine.loop import EngineLoop
from headrace.wire.client import GrpcNodeClient
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.server import ControlServer
from node_runtime.cache_feed import CacheFeed
from node_runtime.service import NodeService
from router.cluster.cluster_index import NodeIndex

BLOCK_SIZE = 16
INCARNATION = 1


class IdleEngine:
    """Runs no steps: the engine's thread only answers the subscriber."""

    num_running = 0

    def next_deadline_s(self) -> None:
        return None

    def admit(self) -> None:
        pass

    def step(self) -> bool:
        return False


class TimedCache:
    """Notes how long the engine's thread is held for a snapshot."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.held_s = 0.0

    def contents(self) -> CacheContents:
        contents, self.held_s = timed(self._cache.contents)
        return contents


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun_s = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begun_s


def filled(num_blocks: int, journal: Journal, readers: str) -> PrefixCache:
    cache = PrefixCache(num_blocks=num_blocks, num_slots=4, block_size=BLOCK_SIZE, on_event=journal.record)
    num_tokens = num_blocks * BLOCK_SIZE
    keys = prefix_keys(range(num_tokens), BLOCK_SIZE)
    claim = cache.claim(keys, num_tokens=num_tokens, hit_policy=ResumeLocally(), max_reuse_tokens=0)
    assert claim is not None
    _, seconds = timed(lambda: cache.publish_blocks(claim, keys, num_tokens))
    print(f"publish: {seconds / num_blocks * 1e6:.2f} us a block with {readers}")
    return cache


async def serve(num_blocks: int, pipe: Connection) -> None:
    """The node: tells its port, then how long its engine's thread was held, when asked."""
    watched = Journal()
    watched.read(Reader(lambda: None), lambda: CacheContents([], []))
    filled(num_blocks, watched, "one reader")
    journal = Journal()
    cache: Any = TimedCache(filled(num_blocks, journal, "no reader"))
    engine: Any = IdleEngine()
    loop = EngineLoop(engine, asyncio.get_running_loop().time, print)
    loop.start()
    nobody: Any = None
    service = NodeService(nobody, nobody, CacheFeed(loop, journal, cache, INCARNATION).updates)
    server = ControlServer(["Node"], lambda server: rpc.add_NodeServicer_to_server(service, server))
    pipe.send(await server.start("127.0.0.1", 0))
    await asyncio.to_thread(pipe.recv)
    pipe.send(cache.held_s)
    await server.stop(0)
    await loop.stop(5)


def serve_process(num_blocks: int, pipe: Connection) -> None:
    asyncio.run(serve(num_blocks, pipe))


async def follow(port: int) -> NodeIndex:
    index, client = NodeIndex(INCARNATION, BLOCK_SIZE), GrpcNodeClient("node", f"127.0.0.1:{port}")
    longest_s = 0.0
    async with client.cache_updates() as call:
        async for update in call:
            _, seconds = timed(partial(index.apply, update))
            longest_s = max(longest_s, seconds)
            if index.is_followed:
                break
    await client.close()
    print(f"router: held for {longest_s * 1e3:.1f} ms at a time at most")
    return index


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main(blocks: int = 1_000_000) -> None:
    """A router that follows a cache of a million blocks."""
    context = multiprocessing.get_context("fork")  # before there is any thread
    here, there = context.Pipe()
    node = context.Process(target=serve_process, args=(blocks, there), daemon=True)
    node.start()
    port = here.recv()
    before = resident_bytes()
    index, seconds = timed(lambda: asyncio.run(follow(port)))
    grown_mib = (resident_bytes() - before) >> 20
    print(f"snapshot of {index.num_blocks} blocks: {seconds:.2f} s, {grown_mib} MiB in the router")
    here.send("done")
    print(f"node: its engine's thread held for {here.recv() * 1e3:.1f} ms")
    node.join(30)
    keys, seconds = timed(lambda: prefix_keys(range(1 << 20), BLOCK_SIZE))
    print(f"a prompt of {1 << 20} tokens: hashed in {seconds * 1e3:.0f} ms")
    _, seconds = timed(lambda: index.match(keys, max_tokens=1 << 20))
    print(f"a prompt of {1 << 20} tokens: looked up in {seconds * 1e3:.1f} ms a node, with no checkpoint there")
