"""What payloads lie in: bytes of the host or of a GPU, and who works on them.

A buffer is a one-dimensional array of bytes: a numpy array on the host, a torch tensor on a GPU. Both have a length,
are sliced, and are taken by UCX as they are. What differs is when work on them is done: on the host at once, on a GPU
in the order of a stream. `StagingMemory` hides that from sessions.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from transfer.protocol.digest import PageHashes, page_hashes

if TYPE_CHECKING:
    import torch

HostBuffer: TypeAlias = NDArray[np.uint8]
Buffer: TypeAlias = Union[HostBuffer, "torch.Tensor"]
Allocator: TypeAlias = Callable[[int], Buffer]


class StagingMemory(Protocol):
    """The memory of a node's staging buffers: `HostMemory`, or `transfer.cuda.CudaMemory`.

    Whoever packs or lands enqueues on the memory's stream, if it has one, and need not wait: the sessions do, by
    `page_hashes` and `finished`, before a buffer goes on to the wire, is given back, or its blocks are called landed.
    """

    def allocate(self, num_buffers: int, buffer_bytes: int) -> list[Buffer]:
        """Equal buffers, their pages touched now rather than in the first hand-over."""
        ...

    def page_hashes(self, payload: Buffer) -> Awaitable[PageHashes]:
        """`transfer.protocol.digest.page_hashes` of the payload, once all that was enqueued so far is done.

        payload   a buffer's beginning, or all of it; what was found is there until that buffer's next summary
        """
        ...

    def finished(self) -> Awaitable[None]:
        """Until all that was enqueued so far is done."""
        ...


class HostMemory:
    """Pageable memory of the host. Nothing is ever enqueued: what was called has happened."""

    def allocate(self, num_buffers: int, buffer_bytes: int) -> list[Buffer]:
        return [allocate_host(buffer_bytes) for _ in range(num_buffers)]

    async def page_hashes(self, payload: Buffer) -> bytes:
        return page_hashes(payload)

    async def finished(self) -> None:
        """It is."""


def allocate_host(num_bytes: int) -> HostBuffer:
    """Zeroed pageable memory, its pages touched now rather than in the first hand-over."""
    return np.full(num_bytes, 0, np.uint8)
