"""Which steps take longer than their contents cost, and why: a running engine under one load after the other.

    python3 -m benchmarks step-profile [--shape granite-h-micro] [--only chunk] [--seconds 2.5] [--no-graphs]
    python3 -m benchmarks step-profile --device cpu --shape tiny --seconds 0.5

One engine in its own thread, beside an event loop that submits requests and takes their tokens, as in a node. Standing
sequences decode all the time; each load adds something: chunks of a long prompt, many short prompts behind a cached
prefix, requests that come and go, messages that land, prompts that arrive and are only read and hashed. Prints, for
each load, the steps' times on the device beside what the costs that the engine has fitted expect of their contents, the
gaps between a sequence's tokens in the event loop, the host's phases, and the slowest steps with their contents: `d64`,
`p512` and `m576` are replays of captured passes of decodes, of prompts and of both, of so many rows; `eager` is a pass
that was launched kernel by kernel.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.engine.step_probe import (
    StepProbe,
    phases_header,
    phases_row,
    slowest_header,
    slowest_rows,
    summary_header,
    summary_row,
)
from benchmarks.engine.steps import greedy, job_of, sequence_of
from benchmarks.shapes import CPU_SHAPES, SHAPES
from headrace.cache.hits import ResumeLocally
from headrace.engine.build import BuiltEngine, engine_around
from headrace.engine.config import EngineConfig
from headrace.engine.loop import EngineLoop
from headrace.engine.sequence import Event, Failed, Finished, Sampled
from headrace.forward.memory import CacheMemory, use_device
from headrace.models.weights import random_model
from headrace.pauses import keep_pauses_short
from headrace.wire import codecs
from headrace.wire import messages as m
from headrace.wire.generated import headrace_pb2 as pb
from node_runtime.packing import BlockLocation, packing_of, staging_memory
from transfer.protocol.plan import PlannedMessage
from transfer.staging import Staging, StagingConfig

VOCABULARY = 1000  # ids below it are in every shape's
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Sizes:
    """Tokens, unless a name says otherwise.

    standing       sequences that decode all the time, at contexts between the two of `contexts`
    chunks         what is left of a step's budget for prompts, one load each
    long_prompt    of the prompts that fill the chunks; their first tokens are nobody else's
    base           the cached prefix of short prompts
    short          the most new tokens of a short prompt
    """

    standing: int
    contexts: tuple[int, int]
    chunks: tuple[int, ...]
    long_prompt: int
    base: int
    short: int
    cache_gib: float
    message_bytes: int


FULL = Sizes(48, (4096, 20480), (384, 512, 1024, 2048), 16384, 4096, 64, 48.0, 32 << 20)
TINY = Sizes(6, (64, 256), (32, 64), 512, 64, 16, 0.25, 64 << 10)


class Bench:
    """An engine under load. Its requests are made and answered in the event loop."""

    def __init__(self, built: BuiltEngine, loop: EngineLoop, sizes: Sizes, seed: int = 0) -> None:
        self.sizes = sizes
        self._built = built
        self._loop = loop
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self.gaps_s: list[float] = []
        self.base = self.prompt(sizes.base)
        self._message_blocks = max(1, sizes.message_bytes // built.layout.block_bytes)
        memory = staging_memory(str(built.memory.device))
        self._staging = Staging(StagingConfig(2, self._message_blocks * built.layout.block_bytes), memory)
        landing = CacheMemory(built.layout, self._message_blocks, 1, built.memory.device)
        self._packing = packing_of(landing, loop, memory)

    async def warm_up(self) -> None:
        """Call it before the engine starts."""
        await self._packing.warm_up(self._staging, math.inf)

    def prompt(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._numbers.integers(300, VOCABULARY, num_tokens).tolist()
        return ids

    def short_prompt(self, most_new: int) -> list[int]:
        return self.base + self.prompt(self._random.randint(1, most_new))

    def pause_s(self, mean_s: float) -> float:
        return self._random.uniform(0.5, 1.5) * mean_s

    async def set_chunk(self, num_tokens: int) -> None:
        """From now on prompts get so many tokens of a step, beside the standing sequences."""
        engine, budget = self._built.engine, num_tokens + self.sizes.standing

        def change() -> None:
            engine._scheduler = replace(engine._scheduler, max_step_tokens=budget)

        await self._loop.call(change)

    async def answer(
        self, prompt: Sequence[int], max_tokens: int, *, is_timed: bool = False, began: asyncio.Event | None = None
    ) -> None:
        """One request, from its submission to its last token.

        is_timed   its gaps between tokens count
        began      set at its first token
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        times: list[float] = []

        def take(event: Event) -> None:
            if isinstance(event, Sampled) and began is not None:
                began.set()
            if isinstance(event, Sampled) and is_timed:
                now_s = time.perf_counter()
                if times:
                    self.gaps_s.append(now_s - times[0])
                times[:] = [now_s]
            if done.done():
                return
            if isinstance(event, Failed):
                done.set_exception(event.error)
            elif isinstance(event, Finished) or (isinstance(event, Sampled) and event.finish is not None):
                done.set_result(None)

        job = job_of(greedy(prompt, max_tokens), max_tokens, ResumeLocally(), partial(self._loop.deliver, take))
        sequence = sequence_of(self._built.engine, job)
        self._loop.post(lambda: self._built.engine.submit(sequence))
        try:
            await done
        finally:
            self._loop.post(lambda: self._built.engine.release(sequence))

    # ------------------------------------------------------------ loads

    async def nothing(self) -> None:
        """Decodes alone."""

    async def long_prompts(self) -> None:
        """Always a prompt to compute: every step has a chunk."""
        while True:
            await self.answer(self.prompt(self.sizes.long_prompt), 1)

    async def short_prompts(self, at_once: int, pause_s: float) -> None:
        """Groups of short prompts, which arrive together."""
        while True:
            await asyncio.gather(*(self.answer(self.short_prompt(self.sizes.short), 1) for _ in range(at_once)))
            await asyncio.sleep(self.pause_s(pause_s))

    async def turns(self, new_tokens: int, max_tokens: int) -> None:
        """One client's turns: a cached prefix, a few new tokens, an answer."""
        while True:
            length = self._random.randint(max_tokens // 2, max_tokens)
            await self.answer(self.short_prompt(new_tokens), length)

    async def landings(self, pause_s: float) -> None:
        """Messages of attention blocks that land in memory of their own, verified as a session's are."""
        num_blocks, num_bytes = self._message_blocks, self._staging.buffer_bytes
        message = PlannedMessage(0, 0, num_blocks, num_bytes, 0, 0)
        location = BlockLocation(range(num_blocks), 0)
        while True:
            async with self._staging.hold(num_bytes, math.inf) as buffer:
                await self._staging.memory.page_hashes(buffer)
                await self._packing.scatter(message, buffer, lambda: location)
                await self._staging.memory.finished()
            await asyncio.sleep(self.pause_s(pause_s))

    async def reading(self, pause_s: float) -> None:
        """Calls with long prompts that are read and hashed in the event loop, as a node does, and go no further."""
        prompt, intake = self.prompt(self.sizes.contexts[1]), self._built.engine.intake
        start = m.Start(greedy(prompt, 128), may_prefill_remotely=True)
        sent = codecs.encode_one_of(start, pb.DecodeCommand()).SerializeToString()
        while True:
            command = codecs.decode_one_of(pb.DecodeCommand.FromString(sent))
            job = job_of(command.request, 1, ResumeLocally(), lambda event: None)
            for _ in intake.hash_prompt(intake.sequence(job)):
                await asyncio.sleep(0)
            await asyncio.sleep(self.pause_s(pause_s))


Load = Callable[[Bench], list[Coroutine[None, None, None]]]


def loads_of(sizes: Sizes) -> dict[str, tuple[int, Load]]:
    """Name, chunk and tasks of each load."""
    chunk = sizes.chunks[-2]

    def chats(bench: Bench) -> list[Coroutine[None, None, None]]:
        turns = [bench.turns(16 * sizes.short, 32) for _ in range(12)]
        return [*turns, bench.landings(0.04), bench.reading(0.05)]

    return {
        "decodes": (chunk, lambda bench: [bench.nothing()]),
        **{f"chunk {n:,}": (n, lambda bench: [bench.long_prompts(), bench.long_prompts()]) for n in sizes.chunks},
        "4 short at once": (chunk, lambda bench: [bench.short_prompts(4, 0.03)]),
        "12 short at once": (chunk, lambda bench: [bench.short_prompts(12, 0.05)]),
        "24 short at once": (chunk, lambda bench: [bench.short_prompts(24, 0.1)]),
        "come and go": (chunk, lambda bench: [bench.turns(sizes.short, 32) for _ in range(16)]),
        "landings": (chunk, lambda bench: [bench.landings(0.02)]),
        "reading": (chunk, lambda bench: [bench.reading(0.04)]),
        "chats": (chunk, chats),
    }


# ------------------------------------------------------------ one shape


@asynccontextmanager
async def running(built: BuiltEngine, sizes: Sizes) -> AsyncIterator[tuple[Bench, StepProbe]]:
    """An engine's loop with the standing sequences decoding."""
    failed: list[BaseException] = []
    loop = EngineLoop(built.engine, time.monotonic, failed.append)
    built.engine.right_of_way.followed_by(asyncio.get_running_loop())  # as a node's loop does
    probe = StepProbe(built.engine, loop, built.memory.device)
    bench = Bench(built, loop, sizes)
    await bench.warm_up()
    loop.start()
    least, most = sizes.contexts
    lengths = [least + (most - least) * i // (sizes.standing - 1) for i in range(sizes.standing)]
    await bench.set_chunk(sizes.chunks[-1])
    begun = [asyncio.Event() for _ in lengths]
    standing = [
        asyncio.create_task(bench.answer(bench.prompt(n), built.max_model_tokens - n, is_timed=True, began=event))
        for n, event in zip(lengths, begun, strict=True)
    ]
    try:
        await asyncio.gather(bench.answer(bench.base, 2), *(event.wait() for event in begun))
        yield bench, probe
    finally:
        probe.close()
        for task in standing:
            task.cancel()
        await asyncio.gather(*standing, return_exceptions=True)
        await loop.stop(TIMEOUT_S)
    if failed:
        raise failed[0]


async def under(bench: Bench, chunk: int, tasks: Load, seconds: float) -> None:
    """Runs a load for so long."""
    await bench.set_chunk(chunk)
    running = [asyncio.create_task(each) for each in tasks(bench)]
    await asyncio.sleep(seconds)
    for task in running:
        task.cancel()
    for result in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def profile(built: BuiltEngine, sizes: Sizes, only: str, seconds: float, slowest: int) -> None:
    summary, phases, slow = [summary_header()], [phases_header()], [slowest_header()]
    async with running(built, sizes) as (bench, probe):
        for name, (chunk, tasks) in loads_of(sizes).items():
            if only not in name:
                continue
            await under(bench, chunk, tasks, min(0.5, seconds))  # what was not there before, from the first run on
            bench.gaps_s, probe.is_recording = [], True
            allocations = _allocations(built)
            await under(bench, chunk, tasks, seconds)
            probe.is_recording = False
            gaps_s, records, costs = bench.gaps_s, probe.take(), built.engine.cost_fit.costs
            summary.append(summary_row(name, records, gaps_s, costs))
            phases.append(phases_row(name, records))
            slow += slowest_rows(name, records, costs, slowest)
            print(f"  {name}: {len(records)} steps, {_allocations(built) - allocations} device allocations", flush=True)
        await _report_waits(built, bench, seconds)
    print(f"  {built.engine.cost_fit.costs}")
    for table in (summary, phases, slow):
        print("\n" + "\n".join(table), flush=True)


async def _report_waits(built: BuiltEngine, bench: Bench, seconds: float) -> None:
    """Prints where the host waits for the device under all loads at once, by torch's own account."""
    if built.memory.device.type != "cuda":
        return
    chunk, tasks = loads_of(bench.sizes)["chats"]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        await under(bench, chunk, tasks, min(1.0, seconds))
        torch.cuda.set_sync_debug_mode("default")
    places = sorted({f"{each.filename}:{each.lineno}" for each in found if "synchroniz" in str(each.message)})
    print(f"  waits for the device: {', '.join(places) or 'none'}", flush=True)


def _allocations(built: BuiltEngine) -> int:
    """Memory that torch took from the device or gave back, each of which waits for all of its work."""
    if built.memory.device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats(built.memory.device)
    return int(stats.get("num_device_alloc", 0) + stats.get("num_device_free", 0))


def main(
    shape: str = "granite-h-micro",
    device: str = "cuda",
    only: Annotated[str, typer.Option(help="loads whose name has this in it")] = "",
    seconds: Annotated[float, typer.Option(help="a load")] = 2.5,
    slowest: Annotated[int, typer.Option(help="steps to show of each load")] = 5,
    graphs: bool = True,
) -> None:
    """Which steps of a busy engine take longer than their contents cost, and why."""
    sizes = TINY if shape == "tiny" else FULL
    config = EngineConfig(
        device=device,
        state_dtype="float32" if device == "cpu" else "bfloat16",
        overlap=True,
        cuda_graphs=graphs,
        cache_bytes=int(sizes.cache_gib * 2**30),
        state_share=0.15,
        max_step_tokens=sizes.chunks[-1] + sizes.standing,
        max_running=2 * sizes.standing,
        max_model_tokens=4 * sizes.contexts[1],
    )
    started_s = time.perf_counter()
    use_device(device)
    shape_config = CPU_SHAPES["granite"] if shape == "tiny" else SHAPES[shape]
    built = engine_around(
        random_model(shape_config, getattr(torch, config.model_dtype), device), config, time.monotonic
    )
    print(f"{shape}: ready after {time.perf_counter() - started_s:.1f} s", flush=True)
    keep_pauses_short()
    asyncio.run(profile(built, sizes, only, seconds, slowest))
