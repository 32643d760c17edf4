"""Both ends of the transfer benchmarks: processes that transfer for real, one device each.

    with Ends("cuda:0", "cuda:1", shape_of(...), num_buffers=8) as ends:
        seconds = ends.one_at_a_time(plan, rounds=20)

Everything that a node's transfer goes through is the product's own: cache memory, packing, staging, digests, sessions,
UCX. There is no engine: nothing computes meanwhile. Times are of the machine's monotonic clock, which both processes
read.
"""

import asyncio
import itertools
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.forward.memory import CacheMemory
from headrace.pauses import keep_pauses_short
from node_runtime.packing import BlockLocation, DevicePacking, HostPacking, Packing, staging_memory
from transfer.backend import Arrival
from transfer.cuda import CudaMemory
from transfer.protocol.authentication import SECRET_BYTES
from transfer.protocol.envelope import Tag
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.receiver import IncomingTransfer, TransferReceiver
from transfer.sender import OutgoingTransfer, TransferSender
from transfer.staging import Staging, StagingConfig
from transfer.ucx import UcxConfig, open_transport

DEADLINE_S = 60.0
SECRET = bytes(SECRET_BYTES)  # both processes know it, as both know the plans
RAW_NONCE = (1 << 47) + 1
WARM_UPS = 3


@dataclass(frozen=True)
class Shape:
    """The contents of each end's cache memory: one prompt's blocks, scattered among twice as many, and a few states."""

    layout: CacheLayout
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a transfer of everything."""
        return self.num_blocks * self.layout.block_bytes + self.layout.state_bytes

    def plan(self, *, first_block: int = 0, max_message_bytes: int) -> TransferPlan:
        """The plan of the whole prompt, or of the blocks from `first_block` on."""
        return TransferPlan(
            nonce=1,
            num_tokens=self.num_blocks * self.layout.block_size,
            first_block=first_block,
            block_size=self.layout.block_size,
            block_bytes=self.layout.block_bytes,
            state_bytes=self.layout.state_bytes,
            max_message_bytes=max(max_message_bytes, self.layout.block_bytes),
        )


def shape_of(num_blocks: int, block_bytes: int, state_bytes: int, dtype: str = "bfloat16") -> Shape:
    """Blocks of one layer and states of eight values a row, of these sizes; the state is a few bytes longer."""
    width = 2 if dtype == "bfloat16" else 4
    layout = CacheLayout(
        fingerprint="bench",
        dtype=dtype,
        state_dtype=dtype,
        block_size=16,
        attention_groups=(AttentionGroup(1, 1, block_bytes // (2 * 16 * width)),),
        state_groups=(StateGroup(1, (4, 4), (state_bytes // width // 8, 8)),),
    )
    return Shape(layout, num_blocks)


class _Sink:
    """Receives bare messages into staging, as they arrive."""

    def __init__(self, end: "End") -> None:
        self._end = end

    def announced(self, arrival: Arrival) -> None:
        self._end.spawn(self._take(arrival))

    async def _take(self, arrival: Arrival) -> None:
        deadline_s = deadline()
        async with self._end.staging.hold(arrival.num_bytes, deadline_s) as buffer:
            await arrival.receive(buffer.payload, deadline_s, None)


class End:
    """One process's side; the parent calls its methods."""

    def __init__(self, device: str, shape: Shape, *, num_buffers: int, ucx: UcxConfig | None = None) -> None:
        if device == "cpu":
            torch.set_num_threads(1)  # the other end needs a core, too
        memory = staging_memory(device)
        ucx = replace(ucx or UcxConfig(), cuda=isinstance(memory, CudaMemory))
        self.transport = open_transport(ucx)
        self.staging = Staging(StagingConfig(num_buffers, shape.num_bytes), memory)
        self.cache = CacheMemory(shape.layout, 2 * shape.num_blocks, 4, device)
        self.packing: Packing = (
            DevicePacking(self.cache, memory) if isinstance(memory, CudaMemory) else HostPacking(self.cache, _at_once)
        )
        self._sender = TransferSender(self.transport, self.staging)
        self._receiver = TransferReceiver(self.transport, self.staging)
        self._tasks: set[asyncio.Task[None]] = set()
        self._expected: list[IncomingTransfer] = []
        self._location = BlockLocation(torch.randperm(2 * shape.num_blocks)[: shape.num_blocks].tolist(), 2)
        self._plan = shape.plan(max_message_bytes=shape.num_bytes)
        self.transport.expect(RAW_NONCE, _Sink(self))

    async def start(self) -> str:
        """Fills the prompt's blocks and its state with contents that both ends know; returns the address."""
        deadline_s = deadline()
        await self.packing.warm_up(self.staging, deadline_s)
        for message in self._plan.messages:
            async with self.staging.hold(message.num_bytes, deadline_s) as buffer:
                as_tensor(buffer.payload).copy_(self._contents(message))
                _synchronize(self.cache.device)
                await self.packing.scatter(message, buffer, lambda: self._location)
                await self.staging.memory.finished()
        return self.transport.address

    async def expect(self, plans: list[TransferPlan]) -> None:
        """Clears the cache and expects the plans' messages."""
        self._location = BlockLocation(self._location.block_ids, 1)
        for pool in self.cache.pools:
            pool.zero_()
        _synchronize(self.cache.device)
        deadline_s = deadline()
        self._expected = [
            self._receiver.expect(plan, secret=SECRET, land=self._land, deadline_s=deadline_s) for plan in plans
        ]
        self._plan = plans[-1]

    async def landed(self) -> tuple[float, float]:
        """The time at which the last one had landed; this thread's processor seconds until then."""
        host_s = time.thread_time()
        landed_s = max(await asyncio.gather(*(self._landed_s(transfer) for transfer in self._expected)))
        return landed_s, time.thread_time() - host_s

    async def send(self, plans: list[TransferPlan], peer: str, at_once: int) -> tuple[float, float]:
        """The time at which the first one's prompt counts as computed; this thread's processor seconds until all are
        sent."""
        first, *others = plans
        transfer = self._open(first, peer)
        await asyncio.sleep(0.001)  # it is open, as one is whose prompt computes
        began_s, host_s, waiting = time.monotonic(), time.thread_time(), iter(others)
        await asyncio.gather(
            self._send_each(waiting, peer, transfer), *(self._send_each(waiting, peer) for _ in range(at_once - 1))
        )
        return began_s, time.thread_time() - host_s

    async def sends(self, peer: str, num_bytes: int, rounds: int, at_once: int) -> float:
        deadline_s = deadline()
        connection = await self.transport.connect(peer, deadline_s)
        waiting = iter(range(rounds))

        async def send_each() -> None:
            async with self.staging.hold(num_bytes, deadline_s) as buffer:
                for _ in waiting:
                    await connection.send(Tag(RAW_NONCE, 0, True), buffer.payload, deadline_s)

        began_s = time.monotonic()
        await asyncio.gather(*(send_each() for _ in range(at_once)))
        return time.monotonic() - began_s

    async def parts(self, plan: TransferPlan, rounds: int) -> dict[str, float]:
        message, memory = plan.messages[0], self.staging.memory
        seconds: dict[str, list[float]] = {}

        async def timed(name: str, *works: Callable[[], Any]) -> None:
            began_s = time.monotonic()
            for work in works:
                await work()
            seconds.setdefault(name, []).append(time.monotonic() - began_s)

        deadline_s = deadline()
        async with self.staging.hold(message.num_bytes, deadline_s) as buffer:
            for _ in range(WARM_UPS + rounds):
                pack = lambda: self.packing.gather(message, buffer, lambda: self._location)  # noqa: E731
                land = lambda: self.packing.scatter(message, buffer, lambda: self._location)  # noqa: E731
                await timed("gather", pack, memory.finished)
                await timed("digest", lambda: memory.page_hashes(buffer))
                await timed("scatter", land, memory.finished)
        return {name: sorted(each[WARM_UPS:])[rounds // 2] for name, each in seconds.items()}

    async def arrived(self) -> bool:
        """Compares the cache with the contents expected, without a digest."""
        whole, deadline_s = True, deadline()
        for message in self._plan.messages:
            async with self.staging.hold(message.num_bytes, deadline_s) as buffer:
                await self.packing.gather(message, buffer, lambda: self._location)
                await self.staging.memory.finished()
                whole = whole and torch.equal(as_tensor(buffer.payload), self._contents(message))
        return whole

    def _contents(self, message: PlannedMessage) -> torch.Tensor:
        """The bytes that the message carries, however the plan is cut into messages."""
        start = message.first_block * self._plan.block_bytes
        blocks = contents(start + message.attention_bytes, self.cache.device)[start:]
        return torch.cat((blocks, contents(message.state_bytes, self.cache.device)))

    async def describe(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.transport.describe().items()}

    def spawn(self, work: Any) -> None:
        """Runs a coroutine beside the caller."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_each(self, waiting: Any, peer: str, *opened: OutgoingTransfer) -> None:
        for transfer in itertools.chain(opened, (self._open(plan, peer) for plan in waiting)):
            transfer.tokens_computed(transfer.plan.num_tokens)
            transfer.finish()
            await transfer.done()

    def _open(self, plan: TransferPlan, peer: str) -> OutgoingTransfer:
        deadline_s = deadline()
        return self._sender.open(plan, peer, secret=SECRET, pack=self._pack, deadline_s=deadline_s)

    async def _pack(self, message: Any, buffer: Any) -> None:
        await self.packing.gather(message, buffer, lambda: self._location)

    async def _land(self, message: Any, buffer: Any) -> None:
        await self.packing.scatter(message, buffer, lambda: self._location)

    async def _landed_s(self, transfer: IncomingTransfer) -> float:
        await transfer.landed()
        return time.monotonic()


def deadline() -> float:
    return asyncio.get_running_loop().time() + DEADLINE_S


def contents(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of a prompt, or of its state, from the first on; no two 8-byte words are equal."""
    words = torch.arange(-(-num_bytes // 8), dtype=torch.int64, device=device) * 0x1E3779B97F4A7C15
    return words.view(torch.uint8)[:num_bytes]


def as_tensor(buffer: Any) -> torch.Tensor:
    return buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def _at_once(work: Callable[[], None]) -> None:
    work()


def run_end(pipe: Connection, device: str, shape: Shape, kwargs: dict[str, Any]) -> None:
    """A process of one End: answers each call that its pipe brings, until the pipe is closed."""
    try:
        asyncio.run(_answer_calls(pipe, device, shape, kwargs))
    except Exception:
        pipe.send(traceback.format_exc())


async def _answer_calls(pipe: Connection, device: str, shape: Shape, kwargs: dict[str, Any]) -> None:
    end = End(device, shape, **kwargs)
    address = await end.start()
    keep_pauses_short()
    pipe.send(address)
    loop = asyncio.get_running_loop()
    while True:
        try:
            name, arguments = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            await end.transport.close()
            return
        pipe.send(await getattr(end, name)(**arguments))


# ---------------------------------------------------------------- the parent's side


@dataclass(frozen=True)
class Took:
    """Seconds from a computed prompt to its last landing, and each end's processor seconds in its event loop's thread.

    A loop that polls a device is busy while it waits. With enough transfers at once it always finds one that can
    continue, and its host time then bounds them.
    """

    seconds: float
    prefill_host_s: float
    decode_host_s: float


class Ends:
    """Both processes, from the parent's side. `kwargs` reach both, `ucx` for one."""

    def __init__(self, prefill_device: str, decode_device: str, shape: Shape, **kwargs: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for device in (prefill_device, decode_device):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_end, args=(theirs, device, shape, kwargs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._prefill, self._decode = self._pipes
        self._nonces = itertools.count(1)
        self._answer(self._prefill)
        self._address = self._answer(self._decode)

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends its process
        for process in self._processes:
            process.join(10)
            process.kill()

    def one_at_a_time(self, plan: TransferPlan, rounds: int) -> list[Took]:
        """Times of single transfers, from a computed prompt to the last landing."""
        return [self._together([self._fresh(plan)], 1) for _ in range(WARM_UPS + rounds)][WARM_UPS:]

    def in_flight(self, plan: TransferPlan, rounds: int, at_once: int) -> Took:
        """The average time of a transfer, with `at_once` under way."""
        self._together([self._fresh(plan) for _ in range(2 * at_once)], at_once)
        took = self._together([self._fresh(plan) for _ in range(rounds)], at_once)
        return Took(took.seconds / rounds, took.prefill_host_s / rounds, took.decode_host_s / rounds)

    def sends(self, num_bytes: int, rounds: int, at_once: int) -> float:
        """Average seconds of a bare message from a staging buffer, with `at_once` under way."""
        call = {"peer": self._address, "num_bytes": num_bytes, "at_once": at_once}
        self._call(self._prefill, "sends", rounds=WARM_UPS * at_once, **call)
        return self._call(self._prefill, "sends", rounds=rounds, **call) / rounds

    def parts(self, plan: TransferPlan, rounds: int) -> dict[str, float]:
        """Median seconds that one end waits for each step on the plan's first message."""
        return self._call(self._prefill, "parts", plan=plan, rounds=rounds)

    def arrived(self) -> bool:
        """True if the last transfer's bytes all lie where they should."""
        return self._call(self._decode, "arrived")

    def describe(self) -> dict[str, str]:
        return self._call(self._prefill, "describe")

    def _fresh(self, plan: TransferPlan) -> TransferPlan:
        return replace(plan, nonce=next(self._nonces))

    def _together(self, plans: list[TransferPlan], at_once: int) -> Took:
        self._call(self._decode, "expect", plans=plans)
        self._prefill.send(("send", {"plans": plans, "peer": self._address, "at_once": at_once}))
        self._decode.send(("landed", {}))
        began_s, prefill_host_s = self._answer(self._prefill)
        landed_s, decode_host_s = self._answer(self._decode)
        return Took(landed_s - began_s, prefill_host_s, decode_host_s)

    def _call(self, pipe: Connection, name: str, **arguments: Any) -> Any:
        pipe.send((name, arguments))
        return self._answer(pipe)

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(2 * DEADLINE_S):
            raise TimeoutError(f"no answer in {2 * DEADLINE_S:.0f} s")
        answer = pipe.recv()
        if isinstance(answer, str) and answer.startswith("Traceback"):
            raise RuntimeError(f"an end failed:\n{answer}")
        return answer
