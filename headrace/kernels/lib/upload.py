"""Host integers to the device, through pinned memory.

Contract  on CUDA no copy blocks the host: torch's allocator keeps the pinned memory until the copy has been made
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.lib.sizes import cdiv, next_power_of_2

NUM_BUFFERS = 4  # the host is two steps ahead of the device at most, and waits for no buffer
ALIGNED_BYTES = 16
"""Alignment of every uploaded list: Triton compiles another kernel for pointers that are no multiple of this."""


def upload_values(values: Sequence, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """torch.tensor(values, device=device), nested lists included, without its wait for the device's queued work."""
    pin_memory = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pin_memory).to(device, non_blocking=True)


def upload_lists(
    lists: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, ...]:
    """A tensor [len] for each list, in order: views of one buffer, uploaded in one copy, each at an aligned address."""
    multiple = ALIGNED_BYTES // dtype.itemsize
    padded = [(*values, *[0] * (-len(values) % multiple)) if len(values) % multiple else values for values in lists]
    buffer = upload_values(list(chain.from_iterable(padded)), device, dtype)
    parts = buffer.split([len(values) for values in padded])
    return tuple(part[: len(values)] for part, values in zip(parts, lists, strict=True))


class PinnedBuffers:
    """Pinned memory that kernels read where it lies: no copy to the device goes before them. On a CPU plain memory.

    with buffers.next(count) as packed:
        ...  # fill packed [count], and launch on the current stream what reads it

    Dropped only behind those kernels: torch's allocator waits for copies alone before it gives the memory away.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=dtype) for _ in range(NUM_BUFFERS)]
        self._read: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._turn = 0

    @contextmanager
    def next(self, count: int) -> Iterator[Tensor]:
        """A buffer's first `count` numbers, uninitialised. Waits for what read this buffer last, some steps before."""
        turn, self._turn = self._turn, (self._turn + 1) % NUM_BUFFERS
        read = self._read[turn]
        if read is not None:
            read.synchronize()
        if len(self._buffers[turn]) < count:
            dtype = self._buffers[turn].dtype
            self._buffers[turn] = torch.empty(next_power_of_2(count), dtype=dtype, pin_memory=self._is_cuda)
        yield self._buffers[turn][:count]
        if self._is_cuda:
            self._read[turn] = read = read or torch.cuda.Event()
            read.record()


class StaticInts:
    """int32 tensors at fixed device addresses, for captured graphs: filled on the host, uploaded together."""

    def __init__(self, capacity: int, device: torch.device):
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._host = np.zeros(capacity, dtype=np.int32)
        self._used = 0

    def take(self, *shape: int) -> tuple[np.ndarray, Tensor]:
        """A host array and its device tensor, at an aligned address: the next `upload` copies the one to the other."""
        first, count = self._used, int(np.prod(shape))
        if first + count > len(self._host):
            raise ValueError(f"{count} numbers more than the capacity of {len(self._host)}: {first} are taken")
        multiple = ALIGNED_BYTES // self._host.itemsize
        self._used = min(cdiv(first + count, multiple) * multiple, len(self._host))
        piece = slice(first, first + count)
        return self._host[piece].reshape(shape), self._device[piece].view(shape)

    def upload(self) -> None:
        """Copies everything that was taken. The host does not wait; kernels launched afterwards see the values."""
        packed = torch.empty(self._used, dtype=torch.int32, pin_memory=self._device.is_cuda)
        packed.numpy()[:] = self._host[: self._used]
        self._device[: self._used].copy_(packed, non_blocking=True)
