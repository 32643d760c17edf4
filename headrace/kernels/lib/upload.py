"""Small index lists from the host to the device, in one copy.

Shapes    any number of int lists; returns one int32 tensor [len] for each, views of one buffer, in order
Contract  on CUDA the copy comes from pinned memory and does not wait for it
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor


def upload_int32(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    packed = torch.tensor(list(chain.from_iterable(lists)), dtype=torch.int32, pin_memory=device.type == "cuda")
    return packed.to(device, non_blocking=True).split([len(values) for values in lists])
