"""Index tensors that stay where they are on the device: filled on the host, brought there in one copy.

Captured graphs read them. Each begins at a multiple of 16 bytes, as Triton compiles another kernel for pointers that
do not.
"""

import numpy as np
import torch
from torch import Tensor

ALIGNED = 4  # numbers


class StaticInts:
    """Room for so many int32 numbers, on the device and again on the host."""

    def __init__(self, capacity: int, device: torch.device):
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._host = np.zeros(capacity, dtype=np.int32)
        self._used = 0

    def take(self, *shape: int) -> tuple[np.ndarray, Tensor]:
        """The same piece twice: what is written into the first is in the second behind the next `upload`."""
        first, count = self._used, int(np.prod(shape))
        if first + count > len(self._host):
            raise ValueError(f"{count} numbers more than the {len(self._host)} there is room for: {first} are taken")
        self._used = min(-(-(first + count) // ALIGNED) * ALIGNED, len(self._host))
        piece = slice(first, first + count)
        return self._host[piece].reshape(shape), self._device[piece].view(shape)

    def upload(self) -> None:
        """All that was taken. On CUDA the copy waits for nothing, and nothing for it but what is launched behind it."""
        packed = torch.empty(self._used, dtype=torch.int32, pin_memory=self._device.is_cuda)
        packed.numpy()[:] = self._host[: self._used]
        self._device[: self._used].copy_(packed, non_blocking=True)
