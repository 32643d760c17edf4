"""Packing: copies one planned message between a staging buffer and cache memory.

On a host the engine's thread copies, between two steps. On a GPU no thread spends time on copying: the event loop
enqueues the copies on the staging memory's stream, beside the engine's, and device events (`wait_event`, and those that
sessions wait for) keep the order between the two.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from headrace.cache.conversion import usual_wire_layouts
from headrace.cache.layout import CacheLayout
from headrace.engine.loop import EngineLoop
from headrace.engine.sequence import DeviceEvent
from headrace.forward.memory import CacheMemory
from headrace.forward.upload import PinnedIds
from headrace.kernels.lib.compile_ahead import compiling_ahead
from transfer.buffers import HostBuffer, HostMemory, StagingBuffer, StagingMemory
from transfer.cuda import CudaMemory, CudaStagingBuffer
from transfer.protocol.plan import PlannedMessage
from transfer.staging import Staging


@dataclass(frozen=True)
class BlockLocation:
    """The blocks and the slot of a prompt in cache memory.

    block_ids   of the whole prompt, in order
    slot        of its state
    wire        the layout that the session's reservation asks for; None: that of the memory
    """

    block_ids: Sequence[int]
    slot: int
    wire: CacheLayout | None = None


Locate = Callable[[], BlockLocation]
"""Returns the location at the moment of the copy; raises when the request no longer holds its blocks."""


class Packing(Protocol):
    """Copies of messages, behind `transfer.sender.Pack` and `transfer.receiver.LandMessage`."""

    async def gather(self, message: PlannedMessage, buffer: StagingBuffer, locate: Locate) -> None:
        """Fills the buffer's payload, or enqueues that. What it reads must have been computed: see `wait_event`."""
        ...

    async def scatter(self, message: PlannedMessage, buffer: StagingBuffer, locate: Locate) -> None:
        """Copies the payload to its blocks and slot, or enqueues that. Nothing that the engine has launched may still
        use them: see `wait_event`."""
        ...

    async def wait_event(self, device_event: DeviceEvent | None) -> None:
        """Waits until the device has done everything that the engine had launched when it recorded the event."""
        ...

    async def warm_up(self, staging: Staging, deadline_s: float) -> None:
        """Does everything that the first transfer would wait for. Call it before the engine starts."""
        ...


def staging_memory(device: str) -> StagingMemory:
    """The staging memory of a node whose engine runs on `device`. Call it in the event loop's thread."""
    where = torch.device(device)
    return CudaMemory(where) if where.type == "cuda" else HostMemory()


def packing_of(memory: CacheMemory, loop: EngineLoop, staging: StagingMemory) -> Packing:
    return DevicePacking(memory, staging) if isinstance(staging, CudaMemory) else HostPacking(memory, loop.call)


class HostPacking:
    """Copies in the thread in which `call` runs its argument: the engine's, between two steps."""

    def __init__(self, memory: CacheMemory, call: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._memory = memory
        self._call = call

    async def gather(self, message: PlannedMessage, buffer: StagingBuffer, locate: Locate) -> None:
        await self._call(lambda: gather(self._memory, message, _host_tensor(buffer), locate()))

    async def scatter(self, message: PlannedMessage, buffer: StagingBuffer, locate: Locate) -> None:
        await self._call(lambda: scatter(self._memory, message, _host_tensor(buffer), locate()))

    async def wait_event(self, device_event: DeviceEvent | None) -> None:
        """Returns at once: the host's work is done when it was launched."""

    async def warm_up(self, staging: Staging, deadline_s: float) -> None:
        """Does nothing: host copies compile nothing."""


def _host_tensor(buffer: StagingBuffer) -> Tensor:
    return torch.from_numpy(cast(HostBuffer, buffer.payload))


class DevicePacking:
    """Enqueues copies on the staging memory's stream."""

    def __init__(self, memory: CacheMemory, staging: CudaMemory) -> None:
        self._memory = memory
        self._staging = staging

    async def gather(self, message: PlannedMessage, buffer: StagingBuffer, locate: Locate) -> None:
        cuda_buffer = cast(CudaStagingBuffer, buffer)
        with self._staging.stream():
            gather(self._memory, message, cuda_buffer.payload, locate(), cuda_buffer.pinned_ids)

    async def scatter(self, message: PlannedMessage, buffer: StagingBuffer, locate: Locate) -> None:
        cuda_buffer = cast(CudaStagingBuffer, buffer)
        with self._staging.stream():
            scatter(self._memory, message, cuda_buffer.payload, locate(), cuda_buffer.pinned_ids)

    async def wait_event(self, device_event: DeviceEvent | None) -> None:
        if device_event is not None:
            await self._staging.wait_event(device_event)

    async def warm_up(self, staging: Staging, deadline_s: float) -> None:
        """Compiles and loads the kernels, including those for peers with another block size or state dtype."""
        async with staging.hold(staging.buffer_bytes, deadline_s) as buffer:
            with compiling_ahead():
                await self._run_kernels(buffer)
            await self._run_kernels(buffer)

    async def _run_kernels(self, buffer: StagingBuffer) -> None:
        """Runs each kernel once and leaves the cache as it was."""
        layout = self._memory.layout
        await self._staging.page_hashes(buffer)
        kept = torch.empty(layout.state_bytes, dtype=torch.uint8, device=self._memory.device)
        with self._staging.stream():
            self._memory.gather_state(0, kept)
        states, blocks = usual_wire_layouts(layout)
        for wire in states:  # a conversion may round
            await self._convert(PlannedMessage(0, 0, 0, 0, wire.state_bytes, 0), wire, buffer)
        for wire in blocks:
            await self._convert(PlannedMessage(0, 0, 1, wire.block_bytes, 0, 0), wire, buffer)
        with self._staging.stream():
            self._memory.scatter_state(0, kept)
        await self._staging.finished()

    async def _convert(self, message: PlannedMessage, wire: CacheLayout, buffer: StagingBuffer) -> None:
        """Gathers the first block or slot in the layout `wire` if the buffer holds it, and scatters it back if blocks
        of that layout land here."""
        if message.num_bytes > len(buffer.whole):
            return
        buffer.cut(message.num_bytes)
        await self.gather(message, buffer, lambda: BlockLocation([0], 0, wire))
        if message.state_bytes or wire == self._memory.layout:
            await self.scatter(message, buffer, lambda: BlockLocation([0], 0, wire))


def gather(
    memory: CacheMemory,
    message: PlannedMessage,
    out: Tensor,
    location: BlockLocation,
    pinned_ids: PinnedIds | None = None,
) -> None:
    """Copies the message's blocks and state to `out`, uint8 [message.num_bytes], in the layout `location.wire`."""
    wire = location.wire or memory.layout
    blocks, state = out[: message.attention_bytes], out[message.attention_bytes :]
    if message.num_blocks:
        memory.gather_prompt(
            location.block_ids, wire.block_size, message.first_block, message.num_blocks, blocks, pinned_ids
        )
    if message.state_bytes:
        memory.gather_state(location.slot, state, wire.state_dtype)


def scatter(
    memory: CacheMemory,
    message: PlannedMessage,
    src: Tensor,
    location: BlockLocation,
    pinned_ids: PinnedIds | None = None,
) -> None:
    """Copies `src`, uint8 [message.num_bytes], to the message's blocks and slot.

    Blocks on the wire have the receiver's layout: only states may need a conversion.
    """
    wire = location.wire or memory.layout
    blocks, state = src[: message.attention_bytes], src[message.attention_bytes :]
    if message.num_blocks:
        block_ids = location.block_ids[message.first_block : message.first_block + message.num_blocks]
        memory.scatter_blocks(block_ids, blocks, pinned_ids)
    if message.state_bytes:
        memory.scatter_state(location.slot, state, wire.state_dtype)
