"""Staging buffers on a GPU: plain device memory, one stream for the work on them, and waiting without a busy thread.

Gathers, digests and scatters follow each other on the memory's own stream, beside the engine's. A gather is enqueued
when what it reads has been computed, a message is sent when its gather and digest are done, a scatter is enqueued when
the digest was right, and a session lands when the scatter is done (`reached`, `summary`, `finished`). So no stream ever
waits for the other, and neither does the engine's thread.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor

from kernels.digest import digest_pages
from transfer.buffers import Buffer
from transfer.digest import DIGEST_BYTES, PAGE_BYTES
from transfer.errors import TransportUnavailable

SPIN_S = 0.0003
"""How long the event loop itself asks, turn by turn, whether work on a buffer is done: it takes a third of that as a
rule, and waking a thread for it as long again. What takes longer is left to a thread that sleeps until then."""

MOST_WAITING = 32
"""Threads that sleep in such waits, made when they are needed."""

WIDEST_STREAM_PRIORITY = -1
"""A gather of microseconds goes before what is left of a prefill chunk's work."""


class CudaMemory:
    """See `transfer.buffers.StagingMemory`. Belongs to one event loop, whose thread it gives the device's context: UCX
    is driven by that thread and finds the context there."""

    def __init__(self, device: torch.device, spin_s: float = SPIN_S) -> None:
        torch.cuda.set_device(device)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device, priority=WIDEST_STREAM_PRIORITY)
        self._spin_s = spin_s
        self._summary_bytes = 0  # of the longest payload
        self._waiting = ThreadPoolExecutor(MOST_WAITING, thread_name_prefix="cuda-wait")

    def allocate(self, num_buffers: int, buffer_bytes: int) -> list[Buffer]:
        """Cut from one allocation: a peer that reads it over CUDA IPC opens it once."""
        stride_bytes = -(-buffer_bytes // PAGE_BYTES) * PAGE_BYTES
        whole = torch.zeros(num_buffers * stride_bytes, dtype=torch.uint8, device=self._device)
        _require_plain_memory(whole)
        # Room for summaries, now rather than in a hand-over: pinning memory waits for the device.
        self._summary_bytes = max(self._summary_bytes, buffer_bytes // PAGE_BYTES * DIGEST_BYTES + PAGE_BYTES)
        _ = [self._pinned() for _ in range(num_buffers)]
        torch.cuda.synchronize(self._device)  # zeroed, on the stream of whoever starts the node
        return [whole[at : at + buffer_bytes] for at in range(0, len(whole), stride_bytes)]

    def stream(self) -> AbstractContextManager[None]:
        """`with memory.stream():` enqueues on it. Not across an await."""
        return cast(AbstractContextManager[None], torch.cuda.stream(self._stream))

    async def summary(self, payload: Buffer) -> bytes:
        tensor = cast(Tensor, payload)
        num_pages, tail_bytes = divmod(len(tensor), PAGE_BYTES)
        paged_bytes, digest_bytes = num_pages * PAGE_BYTES, num_pages * DIGEST_BYTES
        with self.stream():
            host = self._pinned()[: digest_bytes + tail_bytes]
            digests = digest_pages(tensor[:paged_bytes].view(num_pages, PAGE_BYTES))
            host[:digest_bytes].copy_(digests.view(-1), non_blocking=True)
            host[digest_bytes:].copy_(tensor[paged_bytes:], non_blocking=True)
        await self.finished()
        return bytes(host.numpy().data)

    def _pinned(self) -> Tensor:
        """Of one size, so that torch has one at hand that was used before."""
        return torch.empty(self._summary_bytes, dtype=torch.uint8, pin_memory=True)

    async def finished(self) -> None:
        with self.stream():
            event = recorded(self._device)
        give_up_s = asyncio.get_running_loop().time() + self._spin_s
        while not event.query():
            if asyncio.get_running_loop().time() > give_up_s:
                await self.reached(event)
                return
            await asyncio.sleep(0)

    async def reached(self, event: torch.cuda.Event) -> None:
        """Until all that was enqueued before the event was recorded, on its stream, is done."""
        if not event.query():
            await asyncio.get_running_loop().run_in_executor(self._waiting, event.synchronize)


def recorded(device: torch.device) -> torch.cuda.Event:
    """An event at the end of the current stream; whoever waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _require_plain_memory(tensor: Tensor) -> None:
    """CUDA IPC, and so UCX's cuda_ipc, takes what cudaMalloc gave and nothing else."""
    segments: Sequence[dict[str, int]] = torch.cuda.memory_snapshot()
    for segment in segments:
        begin = segment["address"]
        if begin <= tensor.data_ptr() < begin + segment["total_size"] and segment.get("is_expandable"):
            raise TransportUnavailable(
                "staging lies in an expandable segment, which other processes cannot open: start the node without "
                "expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
            )
