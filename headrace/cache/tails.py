"""Tails of running sequences: a state at a base, and a row of a ring with what came after it.

A decode step reads the state at the base and the ring, and adds an entry to the ring for each of its tokens. It writes
a state only when its tokens reach the next multiple of the interval, which then becomes the base. Ends of blocks are
among these multiples, so checkpoints cost decodes nothing. Drafts that are rejected leave nothing behind: their entries
are overwritten, and a state that was written behind one is forgotten with its slot.

The layers' maths: headrace/kernels/lib/tails.py.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.cache.checkpoints import ChunkSpan

MOST_INTERVAL = 16
"""Tokens between two written states at most: reading longer rings costs more than writing states more often saves."""


def tail_interval(block_size: int) -> int:
    """Tokens between two written states: the largest divisor of a block that is not above MOST_INTERVAL."""
    return max(size for size in range(1, MOST_INTERVAL + 1) if block_size % size == 0)


def tail_places(block_size: int) -> int:
    """Places of a ring's row: for the tokens since the base, and for a step's own, as many as an interval at most."""
    return 2 * tail_interval(block_size)


class Tail(NamedTuple):
    """A running sequence's row of the ring, and the tokens before the state that it follows.

    written  in a step: tokens before the state that the step writes; None: it writes none
    """

    row: int
    base: int
    written: int | None = None

    def step(self, span: ChunkSpan, interval: int) -> Tail:
        """The tail in a step of these tokens, at most `interval` of them."""
        boundary = span.start - span.start % interval + interval
        return Tail(self.row, self.base, boundary) if boundary <= span.end else self

    def after(self, num_tokens: int) -> Tail:
        """The tail behind its step, if the sequence's first `num_tokens` tokens count as computed."""
        if self.written is None:
            return self
        return Tail(self.row, self.written if self.written <= num_tokens else self.base)


class BehindCheck(NamedTuple):
    """A sequence's place behind the drafts of the last launch, while only the device knows how many are accepted.

    row         the sequence's row in the layer's passes behind that launch, which count the accepted drafts
    num_drafts  drafts of the sequence in that launch
    base        tokens before the state that the launch writes: the tail begins there if all drafts before that state
                are accepted. None: the launch writes no state
    slot        the slot that this state is written to
    """

    row: int
    num_drafts: int
    base: int | None
    slot: int
