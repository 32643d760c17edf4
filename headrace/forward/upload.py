"""Block and slot ids from the host to the device, range-checked, through pinned memory that is used again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload_ids(
    ids: Sequence[int], limit: int, what: str, device: torch.device, pinned_ids: PinnedIds | None = None
) -> Tensor:
    """int64 [len(ids)] on the device. Raises IndexError unless all ids are in 0..limit-1.

    For a thousand ids many times faster than `upload_values` (headrace/kernels/lib/upload.py).

    pinned_ids   buffers to send them through, at a third of the cost of allocating pinned memory
    """
    values = np.frombuffer(array("q", ids), np.int64)
    if len(values) and values.view(np.uint64).max() >= limit:  # as an unsigned number a negative one is larger, too
        wrong = values[(values < 0) | (values >= limit)][0]
        raise IndexError(f"{what} {wrong} is not in 0..{limit - 1}")
    if pinned_ids is not None:
        return pinned_ids.upload(values)
    if device.type != "cuda":
        return torch.from_numpy(values)
    pinned = torch.empty(len(values), dtype=torch.int64, pin_memory=True)  # torch keeps used ones at hand
    pinned.numpy()[:] = values
    return pinned.to(device, non_blocking=True)


class PinnedIds:
    """Pinned memory and as much of the device's, for ids that are uploaded and used before the next upload.

    The owner ensures that order, and that all of it happens on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._make(0)

    def _make(self, num_ids: int) -> None:
        self._all_pinned = torch.empty(num_ids, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._all_ids = torch.empty(num_ids, dtype=torch.int64, device=self._device)
        self._host: NDArray[np.int64] = self._all_pinned.numpy()
        self._cut(num_ids)

    def _cut(self, num_ids: int) -> None:
        self._pinned, self._ids = self._all_pinned[:num_ids], self._all_ids[:num_ids]

    def upload(self, values: NDArray[np.int64]) -> Tensor:
        """int64 [len(values)], until the next upload. Waits for nothing."""
        if len(values) > len(self._host):
            self._make(len(values))
        if len(values) != self._ids.shape[0]:
            self._cut(len(values))
        self._host[: len(values)] = values
        return self._ids.copy_(self._pinned, non_blocking=True)
