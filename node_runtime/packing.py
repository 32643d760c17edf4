"""Between staging buffers and cache memory: the bytes of one planned message, by whoever may touch the memory.

On a host that is the engine's thread, between two steps. On a GPU nobody's time is spent on copying: the event loop
enqueues it on the staging memory's stream, beside the engine's, and the device's events (`wait_event`, and those that
sessions wait for) keep the order between both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.cache.conversion import usual_wire_layouts
from headrace.cache.layout import CacheLayout
from headrace.engine.loop import EngineLoop
from headrace.engine.sequence import DeviceEvent
from headrace.forward.memory import CacheMemory
from headrace.forward.upload import PinnedIds
from headrace.kernels.lib.compile_ahead import compiling_ahead
from transfer.buffers import Buffer, HostBuffer, HostMemory, StagingMemory
from transfer.cuda import CudaMemory
from transfer.protocol.plan import PlannedMessage
from transfer.staging import Staging


@dataclass(frozen=True)
class Place:
    """Where a prompt lies: the blocks of the whole prompt, in order, and the slot in which its state stands.

    wire   the layout that the session's reservation asks for; None: that of the memory
    """

    block_ids: Sequence[int]
    slot: int
    wire: CacheLayout | None = None


Held = Callable[[], Place]
"""Asked when the bytes are to be touched. Raises when they are not the asker's (any more)."""


class Packing(Protocol):
    """What `transfer.sender.Pack` and `transfer.receiver.LandMessage` come down to."""

    async def gather(self, message: PlannedMessage, buffer: Buffer, held: Held) -> None:
        """Fills the buffer, or enqueues that. What it reads must have been computed: see `wait_event`."""
        ...

    async def scatter(self, message: PlannedMessage, buffer: Buffer, held: Held) -> None:
        """Empties the buffer into blocks or the slot, or enqueues that. Nothing the engine has launched may still touch
        them: see `wait_event`."""
        ...

    async def wait_event(self, device_event: DeviceEvent | None) -> None:
        """Waits until the device has done everything that the engine had launched when it recorded the event."""
        ...

    async def warm_up(self, staging: Staging, deadline_s: float) -> None:
        """Everything that the first hand-over would wait for; only before the engine starts."""
        ...


def staging_memory(device: str) -> StagingMemory:
    """Where the staging buffers of a node lie whose engine runs on `device`. Call in the event loop's thread."""
    where = torch.device(device)
    return CudaMemory(where) if where.type == "cuda" else HostMemory()


def packing_of(memory: CacheMemory, loop: EngineLoop, staging: StagingMemory) -> Packing:
    return DevicePacking(memory, staging) if isinstance(staging, CudaMemory) else HostPacking(memory, loop.call)


class HostPacking:
    """Copies where `call` calls: in the engine's thread, between two steps."""

    def __init__(self, memory: CacheMemory, call: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._memory = memory
        self._call = call

    async def gather(self, message: PlannedMessage, buffer: HostBuffer, held: Held) -> None:
        await self._call(lambda: gather(self._memory, message, torch.from_numpy(buffer), held()))

    async def scatter(self, message: PlannedMessage, buffer: HostBuffer, held: Held) -> None:
        await self._call(lambda: scatter(self._memory, message, torch.from_numpy(buffer), held()))

    async def wait_event(self, device_event: DeviceEvent | None) -> None:
        """What the host has launched has happened."""

    async def warm_up(self, staging: Staging, deadline_s: float) -> None:
        """Nothing is compiled."""


class DevicePacking:
    """Enqueues copies on the staging memory's stream."""

    def __init__(self, memory: CacheMemory, staging: CudaMemory) -> None:
        self._memory = memory
        self._staging = staging
        self._pinned_ids: dict[int, PinnedIds] = {}
        """By the address at which a staging buffer begins."""

    async def gather(self, message: PlannedMessage, buffer: torch.Tensor, held: Held) -> None:
        with self._staging.stream():
            gather(self._memory, message, buffer, held(), self._pinned_ids_of(buffer))

    async def scatter(self, message: PlannedMessage, buffer: torch.Tensor, held: Held) -> None:
        with self._staging.stream():
            scatter(self._memory, message, buffer, held(), self._pinned_ids_of(buffer))

    def _pinned_ids_of(self, buffer: torch.Tensor) -> PinnedIds:
        """What a buffer's last message used is free when the buffer is given to another."""
        pinned_ids = self._pinned_ids.get(buffer.data_ptr())
        if pinned_ids is None:
            pinned_ids = self._pinned_ids[buffer.data_ptr()] = PinnedIds(buffer.device)
        return pinned_ids

    async def wait_event(self, device_event: DeviceEvent | None) -> None:
        if device_event is not None:
            await self._staging.wait_event(device_event)

    async def warm_up(self, staging: Staging, deadline_s: float) -> None:
        """Kernels are compiled and loaded, those for peers that keep blocks or states otherwise, too."""
        async with staging.hold(staging.buffer_bytes, deadline_s) as buffer:
            with compiling_ahead():
                await self._touch(buffer)
            await self._touch(buffer)

    async def _touch(self, buffer: torch.Tensor) -> None:
        """Each kernel once; the cache is left as it was."""
        layout = self._memory.layout
        await self._staging.page_hashes(buffer)
        kept = torch.empty(layout.state_bytes, dtype=torch.uint8, device=buffer.device)
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

    async def _convert(self, message: PlannedMessage, wire: CacheLayout, buffer: torch.Tensor) -> None:
        """With the first block or slot, as it lies on the wire, if it can; blocks land only as they are kept."""
        if message.num_bytes > buffer.nbytes:
            return
        payload = buffer[: message.num_bytes]
        await self.gather(message, payload, lambda: Place([0], 0, wire))
        if message.state_bytes or wire == self._memory.layout:
            await self.scatter(message, payload, lambda: Place([0], 0, wire))


def gather(
    memory: CacheMemory, message: PlannedMessage, out: torch.Tensor, place: Place, pinned_ids: PinnedIds | None = None
) -> None:
    wire = place.wire or memory.layout
    blocks, state = out[: message.attention_bytes], out[message.attention_bytes :]
    if message.num_blocks:
        memory.gather_prompt(
            place.block_ids, wire.block_size, message.first_block, message.num_blocks, blocks, pinned_ids
        )
    if message.state_bytes:
        memory.gather_state(place.slot, state, wire.state_dtype)


def scatter(
    memory: CacheMemory, message: PlannedMessage, src: torch.Tensor, place: Place, pinned_ids: PinnedIds | None = None
) -> None:
    """Blocks on the wire are those of the receiver: only its states may have to be converted."""
    wire = place.wire or memory.layout
    blocks, state = src[: message.attention_bytes], src[message.attention_bytes :]
    if message.num_blocks:
        block_ids = place.block_ids[message.first_block : message.first_block + message.num_blocks]
        memory.scatter_blocks(block_ids, blocks, pinned_ids)
    if message.state_bytes:
        memory.scatter_state(place.slot, state, wire.state_dtype)
