"""Staging buffers on a GPU: plain device memory, one stream for the work on them, and waiting without a busy thread.

Gathers, digests and scatters follow each other on the memory's own stream, beside the engine's. A gather is enqueued
when what it reads has been computed, a message is sent when its gather and digest are done, a scatter is enqueued when
the digest was right, and a session lands when the scatter is done (`wait_event`, `page_hashes`, `finished`). So neither
stream ever waits for the other, nor does the engine's thread.

What a message needs besides its bytes is allocated with the buffer: a launch costs the host about as much as the kernel
runs, and each allocation, small copy or event adds to it.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import cast

import numpy as np
import torch
from torch import Tensor

from headrace.forward.upload import PinnedIds
from headrace.kernels.transfer.digest import digest_pages
from transfer.buffers import StagingBuffer
from transfer.cuda_waits import StreamWaits
from transfer.protocol.digest import DIGEST_BYTES, PAGE_BYTES
from transfer.protocol.errors import TransportUnavailable

SPIN_S = 0.001
"""How long the event loop itself polls, turn by turn, for work on a buffer. That work usually takes a tenth of this, a
fifth when it waits for others' first, and waking a thread for it a third. For longer work a thread sleeps until it is
done."""

MOST_WAITING = 32
"""Threads that may sleep in such waits; each is started when first needed."""

WIDEST_STREAM_PRIORITY = -1
"""A gather of microseconds runs before the rest of a prefill chunk's work."""


class CudaStagingBuffer(StagingBuffer):
    """A staging buffer with the pinned memory that its messages need, so that no message allocates any.

    pages          int64 [P, PAGE_BYTES / 8]: the buffer's pages, the last one padded
    pinned_hashes  int64, pinned host memory: at most P digests and a tail, written by the device itself
    hash_bytes     the same as bytes
    pinned_ids     for the ids of the blocks that a message is gathered from or scattered to; free again when the buffer
                   goes to the next message
    """

    def __init__(self, padded: Tensor, buffer_bytes: int) -> None:
        super().__init__(padded[:buffer_bytes])
        self.pages = padded.view(torch.int64).view(-1, PAGE_BYTES // 8)
        most_words = (len(self.pages) * DIGEST_BYTES + PAGE_BYTES) // 8
        self.pinned_hashes = torch.empty(most_words, dtype=torch.int64, pin_memory=True)
        self.hash_bytes = self.pinned_hashes.numpy().view(np.uint8).data
        self.pinned_ids = PinnedIds(padded.device)


class _OnStream:
    """`torch.cuda.stream` without looking up the previous stream and device each of the four times a message enters it.

    It restores the stream that was the thread's own when this was made."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._own = torch.cuda.current_stream()

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._own)


class CudaMemory:
    """`transfer.buffers.StagingMemory` on a GPU. Belongs to one event loop.

    It makes the device's context current in the loop's thread, where UCX, which that thread drives, looks for it. Wait
    for `finished` before releasing it: the device writes page hashes into memory that torch may hand out again.
    """

    def __init__(self, device: torch.device, spin_s: float = SPIN_S) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(index)
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device, priority=WIDEST_STREAM_PRIORITY)
        self._on_stream = _OnStream(self._stream)
        self._threads = ThreadPoolExecutor(MOST_WAITING, thread_name_prefix="cuda-wait")
        self._waits = StreamWaits(self._new_event, self._threads, spin_s)

    def allocate(self, num_buffers: int, buffer_bytes: int) -> list[CudaStagingBuffer]:
        """Buffers cut from one allocation: a peer that reads them over CUDA IPC opens it once."""
        stride_bytes = -(-buffer_bytes // PAGE_BYTES) * PAGE_BYTES
        whole = torch.zeros(num_buffers * stride_bytes, dtype=torch.uint8, device=self._device)
        _require_plain_memory(whole)
        starts = range(0, whole.nbytes, stride_bytes)
        buffers = [CudaStagingBuffer(whole[at : at + stride_bytes], buffer_bytes) for at in starts]
        torch.cuda.synchronize(self._device)  # the zeros are written on the stream of the node's start
        return buffers

    def stream(self) -> AbstractContextManager[None]:
        """`with memory.stream():` enqueues on the memory's stream. Do not await inside it, nor nest it."""
        return self._on_stream

    def page_hashes(self, buffer: StagingBuffer) -> asyncio.Future[memoryview]:
        cuda_buffer = cast(CudaStagingBuffer, buffer)
        with self.stream():
            num_bytes = digest_pages(cuda_buffer.pages, cuda_buffer.pinned_hashes, cuda_buffer.payload.nbytes)
        return self._waits.until_done(self._stream, cuda_buffer.hash_bytes[:num_bytes])

    def finished(self) -> asyncio.Future[None]:
        return self._waits.until_done(self._stream, None)

    async def wait_event(self, event: torch.cuda.Event) -> None:
        """Waits until everything that was enqueued before the event, on its stream, is done."""
        if not event.query():
            await asyncio.get_running_loop().run_in_executor(self._threads, event.synchronize)

    @staticmethod
    def _new_event() -> torch.cuda.Event:
        return torch.cuda.Event(blocking=True)


def _require_plain_memory(tensor: Tensor) -> None:
    """Raises unless the tensor lies in memory from cudaMalloc: CUDA IPC, and so UCX's cuda_ipc, takes no other."""
    segments: Sequence[dict[str, int]] = torch.cuda.memory_snapshot()
    for segment in segments:
        begin = segment["address"]
        if begin <= tensor.data_ptr() < begin + segment["total_size"] and segment.get("is_expandable"):
            raise TransportUnavailable(
                "staging lies in an expandable segment, which other processes cannot open: start the node without "
                "expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
            )
