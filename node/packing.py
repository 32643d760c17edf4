"""Between staging buffers and cache memory: the bytes of one planned message. In the engine's thread only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.memory import CacheMemory
from transfer.buffers import Buffer
from transfer.plan import Kind, PlannedMessage


def gather(
    memory: CacheMemory, message: PlannedMessage, buffer: Buffer, *, block_ids: Sequence[int], slot: int
) -> None:
    """Fills the buffer. `block_ids` are the whole prompt's, in order; `slot` is where its state stands."""
    out = torch.from_numpy(buffer)
    if message.kind is Kind.STATE:
        memory.gather_state(slot, out)
    else:
        memory.gather_blocks(_of(message, block_ids), out)


def scatter(
    memory: CacheMemory, message: PlannedMessage, buffer: Buffer, *, block_ids: Sequence[int], slot: int
) -> None:
    """Empties the buffer into blocks of the prompt, or into the slot."""
    data = torch.from_numpy(buffer)
    if message.kind is Kind.STATE:
        memory.scatter_state(slot, data)
    else:
        memory.scatter_blocks(_of(message, block_ids), data)


def _of(message: PlannedMessage, block_ids: Sequence[int]) -> Sequence[int]:
    return block_ids[message.first_block : message.first_block + message.num_blocks]
