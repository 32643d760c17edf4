"""Staging buffers on a GPU: plain device memory, one stream for the work on them, and waiting without a busy thread.

Gathers, digests and scatters follow each other on the memory's own stream, beside the engine's. A gather is enqueued
when what it reads has been computed, a message is sent when its gather and digest are done, a scatter is enqueued when
the digest was right, and a session lands when the scatter is done (`wait_event`, `page_hashes`, `finished`). So no
stream ever waits for the other, and neither does the engine's thread.

What a message needs besides its buffer (pinned memory for its page hashes) is made with the buffer: a launch costs
the host about as much as the kernel runs, and each allocation, small copy or event adds to it.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.transfer.digest import digest_pages
from transfer.buffers import Buffer
from transfer.cuda_waits import StreamWaits
from transfer.protocol.digest import DIGEST_BYTES, PAGE_BYTES
from transfer.protocol.errors import TransportUnavailable

SPIN_S = 0.001
"""How long the event loop itself asks, turn by turn, whether work on a buffer is done: it takes a tenth of that as a
rule, a fifth when it has to wait for others' before, and waking a thread for it a third. What takes longer is left to a
thread that sleeps until then."""

MOST_WAITING = 32
"""Threads that sleep in such waits, made when they are needed."""

WIDEST_STREAM_PRIORITY = -1
"""A gather of microseconds goes before what is left of a prefill chunk's work."""


@dataclass(frozen=True, slots=True)
class _Summary:
    """Room for one buffer's.

    words    int64 [P, PAGE_BYTES / 8]: the buffer in pages, the last one filled up
    pinned   int64: P pages' digests and a tail, at most, in the host's memory, where the device writes them itself;
             bytes: the same as bytes
    """

    words: Tensor
    pinned: Tensor
    bytes: memoryview


class _OnStream:
    """`torch.cuda.stream`, entered four times a message, without asking each time which stream and device were before:
    the thread's own, as they were when this was made."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._own = torch.cuda.current_stream()

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._own)


class CudaMemory:
    """See `transfer.buffers.StagingMemory`. Belongs to one event loop, whose thread it gives the device's context: UCX
    is driven by that thread and finds the context there. Who lets go of it has waited for `finished`: the device writes
    summaries into memory that torch may hand out again."""

    def __init__(self, device: torch.device, spin_s: float = SPIN_S) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(index)
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device, priority=WIDEST_STREAM_PRIORITY)
        self._on_stream = _OnStream(self._stream)
        self._threads = ThreadPoolExecutor(MOST_WAITING, thread_name_prefix="cuda-wait")
        self._waits = StreamWaits(self._new_event, self._threads, spin_s)
        self._summaries: dict[int, _Summary] = {}
        """By the address at which a buffer, and so its payload, begins."""

    def allocate(self, num_buffers: int, buffer_bytes: int) -> list[Buffer]:
        """Cut from one allocation: a peer that reads it over CUDA IPC opens it once."""
        stride_bytes = -(-buffer_bytes // PAGE_BYTES) * PAGE_BYTES
        whole = torch.zeros(num_buffers * stride_bytes, dtype=torch.uint8, device=self._device)
        _require_plain_memory(whole)
        padded = [whole[at : at + stride_bytes] for at in range(0, whole.nbytes, stride_bytes)]
        buffers = [each[:buffer_bytes] for each in padded]
        for each in padded:
            self._summaries[each.data_ptr()] = self._room(each)
        torch.cuda.synchronize(self._device)  # zeroed, on the stream of whoever starts the node
        return [*buffers]

    def _room(self, pages: Tensor) -> _Summary:
        words = pages.view(torch.int64).view(-1, PAGE_BYTES // 8)
        most_words = (len(words) * DIGEST_BYTES + PAGE_BYTES) // 8
        pinned = torch.empty(most_words, dtype=torch.int64, pin_memory=True)
        return _Summary(words, pinned, pinned.numpy().view(np.uint8).data)

    def stream(self) -> AbstractContextManager[None]:
        """`with memory.stream():` enqueues on it. Not across an await, nor inside another."""
        return self._on_stream

    def page_hashes(self, payload: Buffer) -> asyncio.Future[memoryview]:
        """The payload begins where one of the buffers does. Lies there until that buffer's next summary."""
        tensor = cast(Tensor, payload)
        room = self._summaries[tensor.data_ptr()]
        with self.stream():
            num_bytes = digest_pages(room.words, room.pinned, tensor.nbytes)
        return self._waits.until_done(self._stream, room.bytes[:num_bytes])

    def finished(self) -> asyncio.Future[None]:
        return self._waits.until_done(self._stream, None)

    async def wait_event(self, event: torch.cuda.Event) -> None:
        """Until all that was enqueued before the event was recorded, on its stream, is done."""
        if not event.query():
            await asyncio.get_running_loop().run_in_executor(self._threads, event.synchronize)

    @staticmethod
    def _new_event() -> torch.cuda.Event:
        return torch.cuda.Event(blocking=True)


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
