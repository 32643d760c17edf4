"""Conversion between two nodes' cache layouts, which may differ in block size and in the state's dtype.

The receiver of a transfer chooses the layout on the wire: blocks of its own size, states as in `CacheLayout.on_wire`.
The sender converts. Everything that follows from unequal layouts is here, but for the copies themselves
(headrace/forward/memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

from headrace.cache.hashing import PrefixHasher, prefix_keys
from headrace.cache.layout import STATE_FORMATS, CacheLayout
from headrace.cache.types import PrefixKey

USUAL_BLOCK_SIZES = (8, 16, 32, 64)
"""Peers' block sizes whose kernels a GPU compiles at start; another one's first transfer waits half a second."""


def conversion_refusal(own: CacheLayout, peer: CacheLayout) -> str | None:
    """The first field, with both values, that forbids transfers between two layouts; None: all can be converted."""
    return own.mismatch(replace(peer, block_size=own.block_size, state_dtype=own.state_dtype))


def usual_wire_layouts(own: CacheLayout) -> tuple[list[CacheLayout], list[CacheLayout]]:
    """Layouts in which peers usually ask for states, and for blocks."""
    states = [own.on_wire(each) for each in STATE_FORMATS]
    blocks = [replace(own, block_size=size) for size in sorted({own.block_size, *USUAL_BLOCK_SIZES})]
    return states, blocks


@dataclass(frozen=True)
class BlockConversion:
    """The same tokens in blocks of `own_size` and in blocks of `peer_size` tokens."""

    own_size: int
    peer_size: int

    @property
    def is_identity(self) -> bool:
        return self.own_size == self.peer_size

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row that lies within one block on both sides, wherever it begins."""
        return gcd(self.own_size, self.peer_size)

    @property
    def boundary_tokens(self) -> int:
        """Every multiple of this, and nothing else, ends a block on both sides."""
        return lcm(self.own_size, self.peer_size)

    def own_blocks(self, first_block: int, num_blocks: int, num_held: int) -> range:
        """Which of the `num_held` own blocks of a prompt hold the tokens of these blocks of the peer's size."""
        start, end = first_block * self.peer_size, (first_block + num_blocks) * self.peer_size
        return range(start // self.own_size, min(-(-end // self.own_size), num_held))

    def peer_key(self, own: PrefixHasher, tokens: Sequence[int], num_tokens: int, salt: bytes) -> PrefixKey:
        """The peer's key of the first `num_tokens` tokens; they are hashed again unless the sizes are equal.

        own         the prompt's keys on this node
        num_tokens  a multiple of `boundary_tokens`
        """
        if self.is_identity:
            return own.keys[num_tokens // self.own_size - 1]
        return prefix_keys(tokens[:num_tokens], self.peer_size, salt)[-1]
