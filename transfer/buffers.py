"""Staging buffers: their bytes, on the host or on a GPU, and the memory that completes the work on them.

Bytes are a one-dimensional array: a numpy array on the host, a torch tensor on a GPU. Both have a length, can be
sliced, and are passed to UCX as they are. Work on them is complete at once on a host, and in the order of a stream on a
GPU; `StagingMemory` hides that difference from sessions.
"""

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union, cast

import numpy as np
from numpy.typing import NDArray

from transfer.protocol.digest import PageHashes, page_hashes

if TYPE_CHECKING:
    import torch

HostBuffer: TypeAlias = NDArray[np.uint8]
Buffer: TypeAlias = Union[HostBuffer, "torch.Tensor"]


class StagingBuffer:
    """One buffer of a pool, and the payload of the message that holds it.

    whole     all its bytes
    payload   the message's bytes: the first ones
    """

    def __init__(self, whole: Buffer) -> None:
        self.whole = whole
        self.payload = whole

    def cut(self, num_bytes: int) -> None:
        """Makes the first `num_bytes` the payload."""
        self.payload = self.whole[:num_bytes]


class StagingMemory(Protocol):
    """The memory of a node's staging buffers: `HostMemory`, or `transfer.cuda.CudaMemory`.

    If the memory has a stream, packing and landing enqueue on it and need not wait. Sessions wait, by `page_hashes` and
    `finished`, before a buffer is sent or given back and before its blocks count as landed.
    """

    def allocate(self, num_buffers: int, buffer_bytes: int) -> Sequence[StagingBuffer]:
        """Equal buffers, their pages touched now rather than in the first transfer."""
        ...

    def page_hashes(self, buffer: StagingBuffer) -> Awaitable[PageHashes]:
        """`transfer.protocol.digest.page_hashes` of the payload, once everything enqueued so far is done.

        The result is valid until the same buffer's next page hashes.
        """
        ...

    def finished(self) -> Awaitable[None]:
        """Waits until everything enqueued so far is done."""
        ...


class HostMemory:
    """Pageable host memory. Nothing is enqueued: work is done when its call returns."""

    def allocate(self, num_buffers: int, buffer_bytes: int) -> list[StagingBuffer]:
        return [StagingBuffer(np.full(buffer_bytes, 0, np.uint8)) for _ in range(num_buffers)]

    async def page_hashes(self, buffer: StagingBuffer) -> bytes:
        return page_hashes(cast(HostBuffer, buffer.payload))

    async def finished(self) -> None:
        """Returns at once: host copies are synchronous."""
