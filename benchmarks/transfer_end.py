"""One end of the transfer benchmarks, in a process of its own: `benchmarks.transfer_ends` tells it what to do.

Everything that a node's hand-over goes through is there and is the product's own: cache memory, packing, staging,
digests, sessions, UCX. What is missing is an engine: nothing computes meanwhile.
"""

import asyncio
import cProfile
import io
import itertools
import pstats
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from headrace.cache.layout import CacheLayout
from headrace.forward.memory import CacheMemory
from node_runtime.packing import DevicePacking, HostPacking, Packing, Place, staging_memory
from node_runtime.process import forget_start_up
from tests.support.transfer.faulty import FaultyTransport
from transfer.backend import Arrival
from transfer.buffers import Buffer, StagingMemory
from transfer.cuda import CudaMemory
from transfer.protocol.authentication import SECRET_BYTES
from transfer.protocol.digest import Summary
from transfer.protocol.envelope import Tag
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.receiver import IncomingTransfer, TransferReceiver
from transfer.sender import OutgoingTransfer, TransferSender
from transfer.staging import Staging, StagingConfig
from transfer.ucx import open_transport
from transfer.ucx_config import UcxConfig

DEADLINE_S = 60.0
SECRET = bytes(SECRET_BYTES)  # both processes know it, as both know the plans
RAW_NONCE = (1 << 47) + 1
WARM_UPS = 3
PROFILE_LINES = 60


@dataclass(frozen=True)
class Shape:
    """What cache memory holds at each end: one prompt's blocks, scattered among twice as many, and a few states."""

    layout: CacheLayout
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        """Of a hand-over of everything."""
        return self.num_blocks * self.layout.block_bytes + self.layout.state_bytes

    def plan(self, *, first_block: int = 0, max_message_bytes: int) -> TransferPlan:
        """Of the whole prompt, or of what lies behind `first_block`."""
        return TransferPlan(
            nonce=1,
            num_tokens=self.num_blocks * self.layout.block_size,
            first_block=first_block,
            block_size=self.layout.block_size,
            block_bytes=self.layout.block_bytes,
            state_bytes=self.layout.state_bytes,
            max_message_bytes=max(max_message_bytes, self.layout.block_bytes),
        )


def shape_of(
    num_blocks: int, block_bytes: int, state_bytes: int, dtype: str = "bfloat16", state_dtype: str = "bfloat16"
) -> Shape:
    """Blocks of one layer and states of 16-byte rows, of these sizes; the state is a few bytes longer."""
    width = 2 if dtype == "bfloat16" else 4
    layout = CacheLayout(
        fingerprint="bench",
        dtype=dtype,
        state_dtype=state_dtype,
        block_size=16,
        num_attention_layers=1,
        num_kv_heads=1,
        head_dim=block_bytes // (2 * 16 * width),
        conv_shape=(1, 4, 4),
        rec_shape=(1, state_bytes // (2 if state_dtype == "bfloat16" else 4) // 8, 8),
    )
    return Shape(layout, num_blocks)


class _Sink:
    """Takes bare messages into staging, as they come."""

    def __init__(self, end: "End") -> None:
        self._end = end

    def announced(self, arrival: Arrival) -> None:
        self._end.spawn(self._take(arrival))

    async def _take(self, arrival: Arrival) -> None:
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        async with self._end.staging.hold(arrival.num_bytes, deadline_s) as buffer:
            await arrival.receive(buffer, deadline_s, None)


class _NotedMemory:
    """Staging memory of which it is noted when a digest is asked for (a payload is packed, or has come) and known."""

    def __init__(self, inner: StagingMemory, note: Callable[[str], None]) -> None:
        self.allocate, self.finished = inner.allocate, inner.finished
        self._inner = inner
        self._note = note

    def summary(self, payload: Buffer) -> asyncio.Future[Summary]:
        size = f"{payload.nbytes:,} bytes"
        self._note(f"digest of {size} begins")
        found = asyncio.ensure_future(self._inner.summary(payload))
        found.add_done_callback(lambda _: self._note(f"digest of {size} known"))
        return found


class End:
    """One process's side: the methods are what the parent calls."""

    def __init__(
        self,
        role: str,
        device: str,
        shape: Shape,
        *,
        num_buffers: int,
        buffer_bytes: int = 0,
        spin_s: float | None = None,
        ucx: UcxConfig | None = None,
    ) -> None:
        if device == "cpu":
            torch.set_num_threads(1)  # the other end needs a core, too
        memory = staging_memory(device) if spin_s is None else CudaMemory(torch.device(device), spin_s)
        ucx = replace(ucx or UcxConfig(), cuda=isinstance(memory, CudaMemory))
        self.transport = open_transport(ucx)
        largest = max(buffer_bytes, shape.num_bytes)
        self.staging = Staging(StagingConfig(num_buffers, largest), memory)
        self.cache = CacheMemory(shape.layout, 2 * shape.num_blocks, 4, device)
        self.packing: Packing = (
            DevicePacking(self.cache, memory) if isinstance(memory, CudaMemory) else HostPacking(self.cache, _at_once)
        )
        self._sender = TransferSender(self.transport, self.staging)
        self._receiver = TransferReceiver(self.transport, self.staging)
        self._tasks: set[asyncio.Task[None]] = set()
        self._role = role
        self._steps: list[tuple[str, float]] | None = None
        """None until they are asked for."""
        self._expected: list[IncomingTransfer] = []
        self._place = Place(torch.randperm(2 * shape.num_blocks)[: shape.num_blocks].tolist(), 2)
        self._plan = shape.plan(max_message_bytes=largest)
        self.transport.expect(RAW_NONCE, _Sink(self))

    async def start(self) -> str:
        """Fills the prompt's blocks and its state with what the other end knows, too."""
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        await self.packing.warm_up(self.staging, deadline_s)
        for message in self._plan.messages:
            async with self.staging.hold(message.num_bytes, deadline_s) as buffer:
                as_tensor(buffer).copy_(self._contents(message))
                _synchronize(self.cache.device)
                await self.packing.scatter(message, buffer, lambda: self._place)
                await self.staging.memory.finished()
        return self.transport.address

    async def expect(self, plans: list[TransferPlan]) -> None:
        """From here on the blocks hold nothing but what lands in them."""
        self._place = Place(self._place.block_ids, 1)
        self.cache.kv.zero_()
        self.cache.rec.zero_()
        self.cache.conv.zero_()
        _synchronize(self.cache.device)
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        self._expected = [
            self._receiver.expect(plan, secret=SECRET, land=self._land, deadline_s=deadline_s) for plan in plans
        ]
        self._plan = plans[-1]

    async def landed(self) -> tuple[float, float]:
        """When the last one had landed; this thread's processor seconds until then."""
        host_s = time.thread_time()
        landed_s = max(await asyncio.gather(*(self._landed_s(transfer) for transfer in self._expected)))
        self._note("landed")
        return landed_s, time.thread_time() - host_s

    async def send(self, plans: list[TransferPlan], peer: str, at_once: int) -> tuple[float, float]:
        """When the first one was told that its prompt is computed; this thread's processor seconds until all are
        sent."""
        first, *others = plans
        transfer = self._open(first, peer)
        await asyncio.sleep(0.001)  # it is open, as one is whose prompt computes
        began_s, host_s, waiting = time.monotonic(), time.thread_time(), iter(others)
        self._note("begins")
        await asyncio.gather(
            self._send_each(waiting, peer, transfer), *(self._send_each(waiting, peer) for _ in range(at_once - 1))
        )
        self._note("sent")
        return began_s, time.thread_time() - host_s

    async def sends(self, peer: str, num_bytes: int, rounds: int, at_once: int) -> float:
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        connection = await self.transport.connect(peer, deadline_s)
        waiting = iter(range(rounds))

        async def send_each() -> None:
            async with self.staging.hold(num_bytes, deadline_s) as buffer:
                for _ in waiting:
                    await connection.send(Tag(RAW_NONCE, 0, True), buffer, deadline_s)

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

        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        async with self.staging.hold(message.num_bytes, deadline_s) as buffer:
            for _ in range(WARM_UPS + rounds):
                pack = lambda: self.packing.gather(message, buffer, lambda: self._place)  # noqa: E731
                land = lambda: self.packing.scatter(message, buffer, lambda: self._place)  # noqa: E731
                digest = lambda: memory.summary(buffer)  # noqa: E731
                await timed("gather", pack, memory.finished)
                await timed("digest", digest)
                await timed("gather + digest", pack, digest)
                await timed("scatter", land, memory.finished)
        return {name: sorted(each[WARM_UPS:])[rounds // 2] for name, each in seconds.items()}

    async def note_steps(self) -> None:
        """Notes the steps of each hand-over from here on."""
        self._steps = []
        self.staging.memory = _NotedMemory(self.staging.memory, self._note)
        self._receiver = TransferReceiver(FaultyTransport(self.transport, self._note_part), self.staging)

    async def profile(self) -> None:
        self._profile = cProfile.Profile()
        self._profile.enable()

    async def profiled(self) -> str:
        self._profile.disable()
        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
        return text.getvalue()

    async def noted(self) -> list[tuple[str, float]]:
        """Since the last call; a step's name, and when it began or ended."""
        steps, self._steps = self._steps or [], []
        return steps

    def _note(self, step: str) -> None:
        if self._steps is not None:
            self._steps.append((f"{self._role}: {step}", time.monotonic()))

    def _note_part(self, part: Arrival, deliver: Callable[[Arrival], None]) -> None:
        """No fault."""
        self._note(f"{'payload' if part.tag.is_payload else 'envelope'} {part.tag.index} announced")
        deliver(part)

    async def arrived(self) -> bool:
        """Gathered once more, without a digest's help."""
        whole, deadline_s = True, asyncio.get_running_loop().time() + DEADLINE_S
        for message in self._plan.messages:
            async with self.staging.hold(message.num_bytes, deadline_s) as buffer:
                await self.packing.gather(message, buffer, lambda: self._place)
                await self.staging.memory.finished()
                whole = whole and torch.equal(as_tensor(buffer), self._contents(message))
        return whole

    def _contents(self, message: PlannedMessage) -> torch.Tensor:
        """What the message carries, in whatever message that would be."""
        start = message.first_block * self._plan.block_bytes
        blocks = contents(start + message.attention_bytes, self.cache.device)[start:]
        return torch.cat((blocks, contents(message.state_bytes, self.cache.device)))

    async def describe(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.transport.describe().items()} | {
            "stats": str(asdict(self.transport.stats))
        }

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_each(self, waiting: Any, peer: str, first: OutgoingTransfer | None = None) -> None:
        transfers = (self._open(plan, peer) for plan in waiting)
        for transfer in transfers if first is None else itertools.chain([first], transfers):
            transfer.tokens_computed(transfer.plan.num_tokens)
            transfer.finish()
            await transfer.done()

    def _open(self, plan: TransferPlan, peer: str) -> OutgoingTransfer:
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        return self._sender.open(plan, peer, secret=SECRET, pack=self._pack, deadline_s=deadline_s)

    async def _pack(self, message: Any, buffer: Any) -> None:
        self._note(f"gather {message.index} begins")
        await self.packing.gather(message, buffer, lambda: self._place)

    async def _land(self, message: Any, buffer: Any) -> None:
        self._note(f"scatter {message.index} begins")
        await self.packing.scatter(message, buffer, lambda: self._place)

    async def _landed_s(self, transfer: IncomingTransfer) -> float:
        await transfer.landed()
        return time.monotonic()


def contents(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of a prompt, or of its state, from the first on: no two 8-byte words are alike."""
    words = torch.arange(-(-num_bytes // 8), dtype=torch.int64, device=device) * 0x1E3779B97F4A7C15
    return words.view(torch.uint8)[:num_bytes]


def as_tensor(buffer: Any) -> torch.Tensor:
    return buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def _at_once(work: Callable[[], None]) -> None:
    work()


def run(pipe: Connection, role: str, device: str, shape: Shape, kwargs: dict[str, Any]) -> None:
    try:
        asyncio.run(_obey(pipe, role, device, shape, kwargs))
    except Exception:
        pipe.send(traceback.format_exc())


async def _obey(pipe: Connection, role: str, device: str, shape: Shape, kwargs: dict[str, Any]) -> None:
    end = End(role, device, shape, **kwargs)
    address = await end.start()
    forget_start_up()
    pipe.send(address)
    loop = asyncio.get_running_loop()
    while True:
        try:
            name, arguments = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            await end.transport.close()
            return
        pipe.send(await getattr(end, name)(**arguments))
