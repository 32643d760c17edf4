"""The two pools and the index, kept consistent: an id is indexed if and only if its pool marks it so.

Eviction follows `headrace.cache.eviction`. A block is given back before those above it in its prefix, and used as often
at most, so the suffix of a prefix is always evicted first (`check()` asserts it). A block that two requests
computed at the same time is indexed once; the second request keeps its own copy private, and what it publishes later
hangs below the first one's block. If that block is evicted, everything below it is forgotten as well, and the second
request publishes its own copies with its next step.
"""

from collections.abc import Callable, Sequence

from headrace.cache.errors import CorruptCache, NotHeld
from headrace.cache.events import BlockEvicted, BlockStored, CacheEvent, CheckpointEvicted, CheckpointStored
from headrace.cache.eviction import EvictionPolicy, Rank, TieredOrder
from headrace.cache.index import Checkpoint, Entry, PrefixIndex
from headrace.cache.pools import BlockPool, StatePool
from headrace.cache.stats import CacheCounters
from headrace.cache.types import PRIMARY, BlockId, PrefixKey, SlotId, Tier


class Storage:
    """Blocks, slots and the index over them; callers read the parts and change them through these methods.

    running_slots      slots of running states
    checkpoint_slots   those of checkpoints: the same pool unless checkpoints are packed (`num_packed_slots`)
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_slots: int,
        num_packed_slots: int = 0,
        block_size: int,
        eviction: EvictionPolicy,
        on_events: Callable[[Sequence[CacheEvent]], None],
    ) -> None:
        self.block_size = block_size
        self._on_events = on_events
        self._eviction = eviction
        self.blocks = BlockPool(num_blocks, eviction.block_order(num_blocks))
        self.running_slots = StatePool(range(num_slots), TieredOrder(self._rank))
        self.checkpoint_slots = self.running_slots
        if num_packed_slots:
            self.checkpoint_slots = StatePool(range(num_slots, num_slots + num_packed_slots), TieredOrder(self._rank))
        self.index = PrefixIndex(num_blocks=num_blocks, block_size=block_size)
        self.totals = CacheCounters()

    @property
    def pools(self) -> tuple[BlockPool | StatePool, ...]:
        if self.running_slots is self.checkpoint_slots:
            return (self.blocks, self.checkpoint_slots)
        return (self.blocks, self.running_slots, self.checkpoint_slots)

    def depth(self, entry: Entry | None) -> int:
        """How many blocks lead from the start of the prompt through `entry`."""
        return 0 if entry is None else entry.num_tokens // self.block_size

    # Reserving

    def reserve_blocks(self, num: int) -> list[BlockId]:
        """`num` blocks, evicting as needed. The caller has checked the pool's `capacity`."""
        missing = num - self.blocks.num_free
        if missing > 0:
            self._evict_blocks(missing)
        blocks = self.blocks.reserve(num)
        if blocks is None:
            raise CorruptCache(f"{num} blocks were promised but are not there")
        return blocks

    def _evict_blocks(self, num: int) -> None:
        index, events = self.index, list[CacheEvent]()
        for block in self.blocks.evict(num):
            # Those below an entry come after it, and go before it: what is left of them is in use.
            for entry in reversed(index.remove(index.by_block(block))):
                if entry.checkpoint is not None:
                    events.append(self._evicted(entry.checkpoint))
                if entry.block != block:
                    self.blocks.uncache(entry.block)
                self.totals.block_evictions += 1
                events.append(BlockEvicted(entry.key))
        self._on_events(events)

    def reserve_slot(self, tier: Tier = PRIMARY) -> SlotId | None:
        """One slot, evicting if need be a checkpoint of this tier or below; None if there is none."""
        if not self.checkpoint_slots.num_free:
            first = self.checkpoint_slots.first(tier)
            if first is None:
                return None
            self._on_events([self._evicted(self.index.detach(self.index.by_slot(first)))])
        slots = self.checkpoint_slots.reserve(1)
        assert slots is not None, "one is free now"
        return slots[0]

    def _rank(self, slot: SlotId) -> Rank:
        checkpoint = self.index.by_slot(slot).checkpoint
        assert checkpoint is not None, "the index finds slots by their checkpoints"
        if checkpoint.tier < PRIMARY:
            return Rank(checkpoint.tier, worth=1.0)
        return Rank(PRIMARY, self._eviction.worth(checkpoint.above_tokens, checkpoint.num_tokens))

    def _evicted(self, checkpoint: Checkpoint) -> CacheEvent:
        self.checkpoint_slots.uncache(checkpoint.slot)
        self.totals.checkpoints_evicted += 1
        self.totals.checkpoints_evicted_unused += checkpoint.num_resumes == 0
        return CheckpointEvicted(checkpoint.key)

    # Indexing

    def index_blocks(self, keys: Sequence[PrefixKey], parent: Entry | None, blocks: Sequence[BlockId]) -> Entry | None:
        """Make held blocks findable, each below the one before it, under keys that are not known yet."""
        self.blocks.cache(*blocks)
        above = (None if parent is None else parent.key, *keys)
        last = self.index.add_chain(keys, parent, blocks)
        self._on_events(list(map(BlockStored, keys, above)))
        return last

    def index_state(self, entry: Entry, slot: SlotId, tier: Tier, above_tokens: int) -> Checkpoint:
        """Make the state in a held slot findable at `entry`, which has none."""
        checkpoint = Checkpoint(entry.key, entry.num_tokens, slot, tier, above_tokens)
        self.checkpoint_slots.cache(slot)
        self.index.attach(entry, checkpoint)
        self.totals.checkpoints_published += 1
        self._on_events([CheckpointStored(checkpoint.key, checkpoint.num_tokens)])
        return checkpoint

    def forget_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Free a checkpoint's slot; not an eviction. False, and no change, if it is referenced or gone."""
        entry = self.index.find(checkpoint)
        if entry is None or self.checkpoint_slots.is_referenced(checkpoint.slot):
            return False
        self.forget_state(entry)
        return True

    def forget_state(self, entry: Entry) -> None:
        """Make the checkpoint of an entry unfindable; not an eviction. Whoever holds it keeps it."""
        checkpoint = self.index.detach(entry)
        self.checkpoint_slots.uncache(checkpoint.slot)
        self._on_events([CheckpointEvicted(checkpoint.key)])

    def forget(self, first: Entry) -> None:
        """Make an entry and all below it in the index unfindable; not an eviction. Whoever holds a block or a
        checkpoint keeps it, and nobody else gets it."""
        events: list[CacheEvent] = []
        for entry in reversed(self.index.remove(first)):
            if entry.checkpoint is not None:
                self.checkpoint_slots.uncache(entry.checkpoint.slot)
                events.append(CheckpointEvicted(entry.key))
            self.blocks.uncache(entry.block)
            events.append(BlockEvicted(entry.key))
        self._on_events(events)

    # References

    def drop_blocks(self, block_ids: Sequence[BlockId], deepest: Entry | None) -> None:
        """Give back the blocks of one request, the last one first; `deepest` is the deepest entry of its prefix.

        What is indexed for the same prefix is touched in the same order, whosever block it is.
        """
        blocks, num_known = self.blocks, self.depth(deepest)
        blocks.drop(*reversed(block_ids[num_known:]))
        if deepest is None:
            return
        own: list[BlockId] = []
        for block, entry in zip(reversed(block_ids[:num_known]), deepest.upward(), strict=True):
            own.append(block)
            if entry.block != block and entry.indexed:
                blocks.drop(*own)
                own.clear()
                blocks.touch(entry.block)
        blocks.drop(*own)

    def drop_slot(self, slot: SlotId) -> None:
        """Give back a reserved slot that was never indexed. Raises NotHeld."""
        if self.checkpoint_slots.is_indexed(slot):
            raise NotHeld(f"slot {slot} holds a published checkpoint: unpublish it instead")
        self.checkpoint_slots.drop(slot)

    # Invariants

    def check(self) -> None:
        """Raise CorruptCache unless pools and index are sound and agree; O(number of blocks)."""
        for pool in self.pools:
            pool.check()
        self.index.check()
        if {entry.block for entry in self.index.entries()} != self.blocks.indexed():
            raise CorruptCache("the index and the block pool disagree on what is cached")
        if {checkpoint.slot for checkpoint in self.index.checkpoints()} != self.checkpoint_slots.indexed():
            raise CorruptCache("the index and the state pool disagree on what is cached")
        self._check_suffix_first()

    def _check_suffix_first(self) -> None:
        turn = {block: position for position, block in enumerate(self.blocks.unused())}
        first_above: dict[Entry, int] = {}
        for entry in sorted(self.index.entries(), key=lambda entry: entry.num_tokens):  # a parent first
            limit = len(turn) if entry.parent is None else first_above[entry.parent]
            own = turn.get(entry.block, limit)
            if own > limit:
                raise CorruptCache(f"block {entry.block} would be evicted after one above it in its prefix")
            first_above[entry] = own
