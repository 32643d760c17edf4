"""What payloads lie in: host bytes as a one-dimensional uint8 array.

A numpy array wraps a torch tensor and the other way round (`torch.from_numpy`) without a copy, and keeps
this package free of torch.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = NDArray[np.uint8]
Allocator: TypeAlias = Callable[[int], Buffer]


def allocate_host(num_bytes: int) -> Buffer:
    """Zeroed pageable memory, its pages touched now rather than in the first hand-over."""
    return np.full(num_bytes, 0, np.uint8)
