"""Claims and holds: values that own a request's or a lease's references to blocks and slots."""

from dataclasses import dataclass, field

from headrace.cache.errors import NotHeld
from headrace.cache.hits import PrefixHit
from headrace.cache.index import Checkpoint, Entry
from headrace.cache.types import BlockId, SlotId


@dataclass(slots=True, eq=False)
class Claim:
    """The blocks and the slot of one running request, from `PrefixCache.claim` to `PrefixCache.release`.

    block_ids       its blocks in order; the first `reused_tokens` worth are shared and must not be written
    slot            its own slot; each step writes the state there
    source          checkpoint that the next step reads instead of `slot`, None once `slot` has been written
    resumed         checkpoint that its first step has read or reads; None: there was none
    hit             what the prompt matched, limited to what it was allowed to reuse
    reused_tokens   tokens that need neither computing nor receiving
    branch_point    where the prompt left a known prefix that has no checkpoint: its prefill should leave one
    deepest_entry   deepest index entry known for its tokens (the cache's own book-keeping)
    primary_tokens  position of the deepest known primary checkpoint of its prefix
    checkpoints     those on its prefix, found or published, by position; some may be gone again
    num_reserved    slots reserved for further checkpoints
    is_proven       a token was drawn from what it holds (headrace/cache/proof.py)
    """

    block_ids: list[BlockId]
    slot: SlotId
    source: Checkpoint | None
    hit: PrefixHit
    reused_tokens: int
    branch_point: int | None
    deepest_entry: Entry | None
    primary_tokens: int
    resumed: Checkpoint | None
    checkpoints: list[Checkpoint] = field(default_factory=list)
    num_reserved: int = 0
    is_proven: bool = False
    released: bool = False

    @property
    def source_slot(self) -> SlotId | None:
        """The slot of `source`: read it in the next step, write `slot`, then call `state_written`."""
        return self.source.slot if self.source is not None else None

    @property
    def state_slot(self) -> SlotId:
        """The slot that its next step reads."""
        return self.slot if self.source is None else self.source.slot

    @property
    def num_checkpoints(self) -> int:
        """Slots that the checkpoints on its prefix fill, those being written included; an upper bound."""
        return len(self.checkpoints) + self.num_reserved

    def require_held(self) -> None:
        """Raise NotHeld once the claim has been released."""
        if self.released:
            raise NotHeld(f"this claim was released already; its slot {self.slot} may be another request's")


@dataclass(slots=True, eq=False)
class Hold:
    """A lease's references to a checkpoint and the blocks below it, which keep them from eviction.

    `last_entry` is the index entry of the last block (the cache's own book-keeping).
    """

    block_ids: list[BlockId]
    last_entry: Entry
    checkpoint: Checkpoint
    released: bool = False

    def require_held(self) -> None:
        """Raise NotHeld once the hold has been dropped."""
        if self.released:
            raise NotHeld("this hold was dropped already")
