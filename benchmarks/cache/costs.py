"""The prefix cache's own work, and a router that follows it. Pure Python, one thread.

    python -m benchmarks cache-costs [--sizes 10000 --sizes 1000000]
    python -m benchmarks cache-updates [--blocks 1000000]

`cache-costs`: hashing, matching, publishing, evicting. Each row fills a cache of so many blocks, one checkpoint for
every 64 of them, and then keeps publishing into it, so that every new block and every new checkpoint evicts an old one.
Times are the best of several rounds; the last column is the slowest of as many prompts as the cache holds, without
collections of garbage. A long prompt in a full cache evicts all its blocks at once: what that holds up.

`cache-updates`: a node process holds one prompt of so many blocks; this process follows it as a router does: the
engine's pause, the snapshot's way, the router's memory, a lookup.
"""

from __future__ import annotations

import asyncio
import gc
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.timing import best_s, table_header, table_row
from headrace.cache.events import CacheContents
from headrace.cache.eviction import EVICTION_POLICIES, eviction_policy
from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import PrefixHit, ResumeLocally
from headrace.cache.journal import Journal, Reader
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.types import PREFIX_KEY_BYTES, PrefixKey
from headrace.engine.loop import EngineLoop
from headrace.right_of_way import RightOfWay
from headrace.wire.client import GrpcNodeClient
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.server import ControlServer
from node_runtime.cache_feed import CacheFeed
from node_runtime.service import NodeService
from router.cluster.cluster_index import NodeIndex

BLOCK_SIZE = 16
PROMPT_TOKENS = 131_072
CHAIN_BLOCKS = 64  # of one prompt that fills the cache
LONG_BLOCKS = 2048
ROUNDS = 7


def chain(number: int, num_blocks: int = CHAIN_BLOCKS) -> list[PrefixKey]:
    """Keys of one prompt that shares nothing; as random as hashes, and quicker made."""
    size = PREFIX_KEY_BYTES
    data = random.Random(number).randbytes(num_blocks * size)
    return [PrefixKey(data[start : start + size]) for start in range(0, len(data), size)]


def serve(cache: PrefixCache, keys: list[PrefixKey], *checkpoints: int) -> None:
    """A prompt that is computed, publishes its blocks and the given checkpoints (in blocks), and ends."""
    num_tokens = len(keys) * cache.block_size
    claim = cache.claim(keys, num_tokens=num_tokens, hit_policy=ResumeLocally(), max_reuse_tokens=0)
    assert claim is not None
    cache.state_written(claim)
    cache.publish_blocks(claim, keys, num_tokens)
    for position in checkpoints:
        slot = cache.reserve_slot(claim)
        assert slot is not None
        cache.publish_checkpoint(claim, keys[position - 1], position * cache.block_size, slot)
    cache.release(claim)


def serve_all(cache: PrefixCache, prompts: Iterable[list[PrefixKey]]) -> None:
    for keys in prompts:
        serve(cache, keys, CHAIN_BLOCKS)


def row(num_blocks: int) -> str:
    """Fill, then measure in the steady state of eviction."""
    cache = PrefixCache(num_blocks=num_blocks, num_slots=num_blocks // CHAIN_BLOCKS + 2, block_size=BLOCK_SIZE)
    num_chains = num_blocks // CHAIN_BLOCKS
    serve_all(cache, (chain(number) for number in range(num_chains)))
    batches = [[chain(num_chains + 100 * batch + i) for i in range(100)] for batch in range(ROUNDS)]
    evictions = cache.stats().totals.block_evictions
    publish_s = best_s(lambda: serve_all(cache, batches.pop()), ROUNDS)
    evicted = (cache.stats().totals.block_evictions - evictions) / ROUNDS / 100 / CHAIN_BLOCKS
    served = [chain(2 * num_chains + 100 * ROUNDS + i) for i in range(num_chains)]
    gc.disable()
    longest_s = max(timed(partial(serve, cache, keys, CHAIN_BLOCKS))[1] for keys in served)
    gc.enable()
    long = prefix_keys(range(PROMPT_TOKENS), BLOCK_SIZE)
    serve(cache, long, 1)  # the farthest checkpoint from the end that there can be
    hit = PrefixHit(PROMPT_TOKENS, BLOCK_SIZE, BLOCK_SIZE)
    assert cache.match(long, max_tokens=PROMPT_TOKENS) == hit
    match_s = best_s(lambda: cache.match(long, max_tokens=PROMPT_TOKENS), 50)
    cache.check()
    per_block_us = 1e6 * publish_s / 100 / CHAIN_BLOCKS
    return table_row(
        f"{num_blocks:,}", f"{1e3 * match_s:.2f}", f"{per_block_us:.2f}", f"{evicted:.2f}", f"{1e3 * longest_s:.2f}"
    )


def long_prompt(eviction: str, num_blocks: int = LONG_BLOCKS) -> str:
    """A prompt that evicts so many blocks when it is admitted, and gives as many back at its end: medians."""
    cache = PrefixCache(
        num_blocks=32 * num_blocks, num_slots=4, block_size=BLOCK_SIZE, eviction=eviction_policy(eviction)
    )
    num_tokens = num_blocks * BLOCK_SIZE
    times: list[tuple[float, float, float]] = []
    for number in range(96):
        keys = chain(number, num_blocks)
        claim, admitted_s = timed(
            partial(
                cache.claim, keys, num_tokens=num_tokens, hit_policy=ResumeLocally(), max_reuse_tokens=num_tokens - 1
            )
        )
        cache.state_written(claim)
        _, published_s = timed(partial(cache.publish_blocks, claim, keys, num_tokens))
        _, released_s = timed(partial(cache.release, claim))
        times.append((admitted_s, published_s, released_s))
    full = [f"{1e3 * sorted(column)[len(column) // 2]:.2f}" for column in zip(*times[48:], strict=True)]
    return table_row(eviction, *full)


def main(sizes: list[int] = [10_000, 100_000, 1_000_000]) -> None:  # noqa: B006
    """The cache's own work; `sizes` in blocks."""
    tokens = list(range(PROMPT_TOKENS))
    seconds = best_s(lambda: prefix_keys(tokens, BLOCK_SIZE), ROUNDS)
    print(f"hashing: {PROMPT_TOKENS / seconds / 1e6:.1f} M tokens/s, {1e3 * seconds:.1f} ms for {PROMPT_TOKENS:,}\n")
    match = f"match {PROMPT_TOKENS:,} tokens, ms"
    longest = f"{CHAIN_BLOCKS} blocks, at most, ms"
    print(table_header("blocks in the cache", match, "publish and evict a block, us", "evicted a block", longest))
    for size in sizes:
        print(row(size), flush=True)
    print()
    print(table_header(f"a prompt of {LONG_BLOCKS:,} blocks, ms", "admitted, evicting", "published", "released"))
    for name in EVICTION_POLICIES:
        print(long_prompt(name), flush=True)


INCARNATION = 1


class IdleEngine:
    """Runs no steps: the engine's thread only answers the subscriber."""

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
    cache = PrefixCache(num_blocks=num_blocks, num_slots=4, block_size=BLOCK_SIZE, on_events=journal.record)
    num_tokens = num_blocks * BLOCK_SIZE
    keys = prefix_keys(range(num_tokens), BLOCK_SIZE)
    claim = cache.claim(keys, num_tokens=num_tokens, hit_policy=ResumeLocally(), max_reuse_tokens=0)
    assert claim is not None
    _, seconds = timed(lambda: cache.publish_blocks(claim, keys, num_tokens))
    print(f"publish: {seconds / num_blocks * 1e6:.2f} us a block with {readers}")
    return cache


async def feed(num_blocks: int, pipe: Connection) -> None:
    """The node: reports its port and then, when asked, for how long its engine's thread was held."""
    watched = Journal()
    watched.read(Reader(lambda: None), lambda: CacheContents([], []))
    filled(num_blocks, watched, "one reader")
    journal = Journal()
    cache: Any = TimedCache(filled(num_blocks, journal, "no reader"))
    engine: Any = IdleEngine()
    loop = EngineLoop(engine, asyncio.get_running_loop().time, print)
    loop.start()
    node: Any = SimpleNamespace(cache_updates=CacheFeed(loop, journal, cache, INCARNATION).updates)
    service = NodeService(node)
    server = ControlServer(["Node"], lambda server: rpc.add_NodeServicer_to_server(service, server))
    pipe.send(await server.start("127.0.0.1", 0))
    await asyncio.to_thread(pipe.recv)
    pipe.send(cache.held_s)
    await server.stop(0)
    await loop.stop(5)


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


def updates(blocks: int = 1_000_000) -> None:
    """A router that follows a cache of a million blocks."""
    context = multiprocessing.get_context("fork")  # before there is any thread
    here, there = context.Pipe()
    node = context.Process(target=lambda: asyncio.run(feed(blocks, there)), daemon=True)
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
