"""The prefix cache of one node: requests claim blocks and slots, publish and donate them, and give them back.

Calls are atomic: each does its whole work or, when the cache is full, nothing. Nothing here touches a tensor or waits.
All calls come from one thread, between steps.

A step of a running request, in order: read `claim.source_slot`, or `claim.slot` if that is None; write
`claim.slot`; then `state_written(claim)`, `publish_blocks(...)`, and perhaps `publish_checkpoint` for the
states that the kernels emitted, or `donate_running` for the running one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from headrace.cache.checkpoint_slots import CheckpointSlots, DonatedSlots, PackedPool, PackedSlots
from headrace.cache.claims import Claim, Hold
from headrace.cache.draft_slots import DraftSlots
from headrace.cache.errors import BadTokens, MisplacedState
from headrace.cache.events import CacheContents, CacheEvent
from headrace.cache.eviction import EvictionPolicy, eviction_policy
from headrace.cache.hits import HitPolicy, PrefixHit
from headrace.cache.index import Checkpoint, Entry
from headrace.cache.proof import forget_unproven, prove
from headrace.cache.stats import CacheStats
from headrace.cache.storage import Storage
from headrace.cache.types import PRIMARY, BlockId, PrefixKey, SlotId, Tier


class PrefixCache:
    """Two independent pools under one index of prefixes.

    num_slots         slots of running states, and of checkpoints unless these are packed
    num_draft_slots   slots beyond `num_slots` that hold states between drafts: no claim or checkpoint takes them
    packed            checkpoints' own pool; None: a state becomes a checkpoint where it is, without a copy
    eviction          eviction order of checkpoints; None: the default policy
    on_events         called with everything that becomes findable or stops being so, in order, as it happens
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_slots: int,
        block_size: int,
        num_draft_slots: int = 0,
        packed: PackedPool | None = None,
        eviction: EvictionPolicy | None = None,
        on_events: Callable[[Sequence[CacheEvent]], None] = lambda events: None,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("num_slots", num_slots), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.block_size = block_size
        self._storage = Storage(
            num_blocks=num_blocks,
            num_slots=num_slots + num_draft_slots + (packed.num_emission_slots if packed is not None else 0),
            num_packed_slots=packed.num_slots if packed is not None else 0,
            block_size=block_size,
            eviction=eviction or eviction_policy(),
            on_events=on_events,
        )
        self.draft_slots = DraftSlots(self._storage.running_slots.reserve(num_draft_slots) or [])
        self._slots: CheckpointSlots = (
            DonatedSlots(self._storage, num_slots) if packed is None else PackedSlots(self._storage, packed)
        )

    # Matching and claiming

    def match(self, keys: Sequence[PrefixKey], *, max_tokens: int) -> PrefixHit:
        """The hit of a prompt's first `max_tokens` tokens. Read-only: the eviction order stays, too."""
        deepest = self._storage.index.deepest(keys, max_tokens // self.block_size)
        if deepest is None:
            return PrefixHit(attention_tokens=0, state_tokens=0, resumable_tokens=0)
        checkpoint = deepest.deepest_checkpoint()
        state_tokens = checkpoint.num_tokens if checkpoint is not None else 0
        # A checkpoint is forgotten with the blocks below it, so one that is found can be resumed from.
        return PrefixHit(deepest.num_tokens, state_tokens, resumable_tokens=state_tokens)

    def claim(
        self,
        keys: Sequence[PrefixKey],
        *,
        num_tokens: int,
        hit_policy: HitPolicy,
        max_reuse_tokens: int,
        min_blocks_left: int = 0,
    ) -> Claim | None:
        """Starts a request: shares the blocks it reuses, reserves blocks up to `num_tokens` and a slot of its own.

        keys               of the prompt's full blocks
        hit_policy         how much of the hit is reused, and whether a checkpoint is read first
        max_reuse_tokens   usually `hit_policy.reuse_limit(prompt length)`
        min_blocks_left       how many more blocks must stay available, so that running requests can grow

        None, and no change, if the cache is too full even when everything evictable were evicted.
        """
        storage = self._storage
        hit = self.match(keys, max_tokens=max_reuse_tokens)
        reused_tokens = hit_policy.reusable_tokens(hit)
        deepest = self._entry_at(keys, reused_tokens)
        source = self._checkpoint_at(keys, hit_policy.resume_tokens(hit))
        shared = _blocks_through(deepest)
        num_new = max(0, self._num_blocks(num_tokens) - len(shared))
        num_wanted = num_new + min_blocks_left
        if storage.blocks.capacity(keeping=shared) < num_wanted or not self._slots.has_room(source):
            return None

        storage.blocks.acquire(*shared)
        if source is not None:
            self._resume_from(source)
        branch_point = hit_policy.branch_point(hit)
        if hit_policy.is_lookup:
            self._count_lookup(hit, reused_tokens, max_reuse_tokens)
            if not hit_policy.state_arrives:
                self._count_state_lookup(hit, branch_point, max_reuse_tokens)
        slot, to_read = self._slots.start(source)
        return Claim(
            block_ids=shared + storage.reserve_blocks(num_new),
            slot=slot,
            source=to_read,
            hit=hit,
            reused_tokens=reused_tokens,
            branch_point=branch_point,
            deepest_entry=deepest,
            primary_tokens=hit.state_tokens,
            resumed=source,
            checkpoints=_checkpoints_through(deepest),
        )

    def count_fetched(self, claim: Claim, num_tokens: int, *, max_reuse_tokens: int) -> None:
        """Counts the lookup of a prompt whose first `num_tokens` tokens another node has sent: they are hits, too."""
        own, totals = claim.hit, self._storage.totals
        found = PrefixHit(
            attention_tokens=max(own.attention_tokens, num_tokens),
            state_tokens=max(own.state_tokens, num_tokens),
            resumable_tokens=max(own.resumable_tokens, num_tokens),
        )
        self._count_lookup(found, claim.reused_tokens, max_reuse_tokens)
        self._count_state_lookup(found, claim.branch_point, max_reuse_tokens)
        totals.attention_fetched_tokens += found.attention_tokens - own.attention_tokens
        totals.state_fetched_tokens += found.state_tokens - own.state_tokens

    def extend(self, claim: Claim, num_tokens: int, *, min_blocks_left: int = 0) -> bool:
        """Appends blocks until `claim` covers `num_tokens`. False, and no change, if there are too few.

        min_blocks_left   how many more blocks must stay available
        """
        claim.require_held()
        if num_tokens <= len(claim.block_ids) * self.block_size:
            return True  # as for most tokens
        num_new = self._num_blocks(num_tokens) - len(claim.block_ids)
        if self._storage.blocks.capacity() < num_new + min_blocks_left:
            return False
        claim.block_ids.extend(self._storage.reserve_blocks(num_new))
        return True

    def release(self, claim: Claim) -> None:
        """Ends a request at any time: gives back all that `claim` holds. Raises NotHeld the second time."""
        claim.require_held()
        claim.released = True
        self._storage.drop_blocks(claim.block_ids, claim.deepest_entry)
        self._storage.running_slots.drop(claim.slot)
        if claim.source is not None:
            self._storage.checkpoint_slots.drop(claim.source.slot)

    # Publishing

    def publish_blocks(self, claim: Claim, keys: Sequence[PrefixKey], num_computed_tokens: int) -> None:
        """Makes the full blocks of the first `num_computed_tokens` tokens findable; O(1) for each new block.

        `keys` are those of the request's tokens, at least one for each full block; else raises BadTokens. A
        key that is known keeps its first block; the claim's copy stays private and is free again after
        release.
        """
        claim.require_held()
        num_full = num_computed_tokens // self.block_size
        if num_full > len(claim.block_ids) or num_full > len(keys):
            raise BadTokens(
                f"{num_computed_tokens} computed tokens fill {num_full} blocks, "
                f"but the claim has {len(claim.block_ids)} blocks and {len(keys)} keys"
            )
        storage, deepest = self._storage, claim.deepest_entry
        if deepest is not None and deepest.indexed and deepest.num_tokens == num_full * self.block_size:
            return  # as for most tokens
        # Another request's block above ours was evicted, and ours were forgotten with it: publish them again.
        while deepest is not None and not deepest.indexed:
            deepest = deepest.parent
        position = storage.depth(deepest)
        while position < num_full and (known := storage.index.get(keys[position])) is not None:
            deepest, position = known, position + 1
        if position < num_full:  # a key that follows on an unknown one is unknown, too
            deepest = storage.index_blocks(keys[position:num_full], deepest, claim.block_ids[position:num_full])
        claim.deepest_entry = deepest

    def reserve_slot(self, claim: Claim, tier: Tier = PRIMARY) -> SlotId | None:
        """A slot for a checkpoint that a kernel will emit; owned by the caller until published or given back.

        Evicts, if need be, an unreferenced checkpoint of this tier or below; one on the claim's own prefix when these
        fill their share of the slots (`PREFIX_SHARE`). None if there is none to evict. Packed checkpoints evict when
        they are published; what is reserved for them are slots set aside.
        """
        claim.require_held()
        return self._slots.reserve(claim, tier)

    def release_slot(self, claim: Claim, slot: SlotId) -> None:
        """Give back a reserved slot that will not be published (its request was aborted). Raises NotHeld."""
        self._slots.give_back(claim, slot)

    def publish_checkpoint(
        self, claim: Claim, key: PrefixKey, num_tokens: int, slot: SlotId, tier: Tier = PRIMARY
    ) -> Checkpoint | None:
        """Donate a reserved slot, whose state is that of the `num_tokens` tokens that `key` names.

        None, and the slot is given back, if there is a checkpoint already or the blocks are not (or no
        longer) findable: publish the blocks first. Raises MisplacedState if `key` names another number of
        tokens.
        """
        claim.require_held()
        entry = self._vacant_entry(key, num_tokens)
        if entry is None:
            self.release_slot(claim, slot)
            return None
        return self._slots.publish(claim, entry, slot, tier)

    def donate_running(self, claim: Claim, key: PrefixKey, num_tokens: int, tier: Tier = PRIMARY) -> Checkpoint | None:
        """Turns the running state of `claim` into a checkpoint; unless it is packed, nothing is copied.

        The next step then reads that checkpoint (`claim.source`, referenced) and writes a newly reserved slot.
        None, and no change, if no slot is available, if there is a checkpoint already, or if the blocks are
        not findable. Raises MisplacedState if `key` names another number of tokens, or if the claim's slot
        has not been written yet.
        """
        claim.require_held()
        if claim.source is not None:
            raise MisplacedState(f"slot {claim.slot} cannot be donated before state_written(): it is empty")
        entry = self._vacant_entry(key, num_tokens)
        return self._slots.publish_running(claim, entry, tier) if entry is not None else None

    def state_written(self, claim: Claim) -> None:
        """A step has written `claim.slot`: the next step reads it, and the source, if any, is released."""
        claim.require_held()
        if claim.source is not None:
            self._storage.checkpoint_slots.drop(claim.source.slot)
            claim.source = None

    def unpublish(self, checkpoint: Checkpoint) -> bool:
        """Forgets a superseded checkpoint and frees its slot. False, no change, if it is referenced or gone.

        Called before `donate_running`, it frees the slot that the donation needs.
        """
        return self._storage.forget_checkpoint(checkpoint)

    def prove(self, claim: Claim) -> None:
        """Notes that a token was drawn from what `claim` has read and published: it holds numbers."""
        claim.require_held()
        prove(claim, self.block_size)

    def forget_unproven(self, claim: Claim) -> bool:
        """Makes unfindable what `claim` has read or published without proof, before `release`: it may hold NaN.

        With it goes what others have published behind these blocks; they keep what they hold. Returns True if some was
        there before the claim: without, the same prompt may have a next token.
        """
        claim.require_held()
        return forget_unproven(self._storage, claim)

    # Holding beyond a request

    def find_checkpoint(self, key: PrefixKey) -> Checkpoint | None:
        """The checkpoint of the prefix that `key` names. Read-only: the eviction order stays, too."""
        entry = self._storage.index.get(key)
        return None if entry is None else entry.checkpoint

    def hold_checkpoint(self, checkpoint: Checkpoint) -> Hold | None:
        """References to a checkpoint and the blocks below it, for a node that resumes from it; None if it is gone."""
        last = self._storage.index.find(checkpoint)
        if last is None:
            return None
        block_ids = _blocks_through(last)
        self._storage.blocks.acquire(*block_ids)
        self._resume_from(checkpoint)
        return Hold(block_ids, last, checkpoint)

    def drop(self, hold: Hold) -> None:
        """Give back what `hold` refers to. Raises NotHeld the second time."""
        hold.require_held()
        hold.released = True
        self._storage.drop_blocks(hold.block_ids, hold.last_entry)
        self._storage.checkpoint_slots.drop(hold.checkpoint.slot)

    # Looking inside

    def contents(self) -> CacheContents:
        """The findable blocks and checkpoints at this moment: a snapshot for late readers."""
        index = self._storage.index
        return CacheContents(index.keys(), [checkpoint.key for checkpoint in index.checkpoints()])

    def stats(self) -> CacheStats:
        storage, slots = self._storage, self._storage.running_slots.counts()
        return CacheStats(
            blocks=storage.blocks.counts(),
            slots=replace(slots, in_use=slots.in_use - self.draft_slots.num_free - self._slots.num_idle),
            packed=None if storage.running_slots is storage.checkpoint_slots else storage.checkpoint_slots.counts(),
            num_indexed_blocks=storage.index.num_blocks,
            num_checkpoints=storage.index.num_checkpoints,
            totals=replace(storage.totals),
        )

    def pool_checks(self) -> Iterator[None]:
        """Raises CorruptCache unless free + cached + in use = total, for blocks and slots; see `_Pool.checks`."""
        for pool in self._storage.pools:
            yield from pool.checks()

    def check(self) -> None:
        """Raise CorruptCache unless every invariant holds, the index's too; O(number of blocks)."""
        self._storage.check()

    # Pieces

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _entry_at(self, keys: Sequence[PrefixKey], num_tokens: int) -> Entry | None:
        return self._storage.index.get(keys[num_tokens // self.block_size - 1]) if num_tokens else None

    def _checkpoint_at(self, keys: Sequence[PrefixKey], num_tokens: int | None) -> Checkpoint | None:
        if num_tokens is None:
            return None
        entry = self._entry_at(keys, num_tokens)
        if entry is None or entry.checkpoint is None:
            raise MisplacedState(f"the hit policy resumes at {num_tokens} tokens: there is no checkpoint")
        return entry.checkpoint

    def _vacant_entry(self, key: PrefixKey, num_tokens: int) -> Entry | None:
        """The entry that a checkpoint under `key` would get; None if its blocks are unknown or it has one already."""
        entry = self._storage.index.get(key)
        if entry is None:
            return None
        if entry.num_tokens != num_tokens:
            raise MisplacedState(f"a state of {num_tokens} tokens came with a key of {entry.num_tokens}")
        return entry if entry.checkpoint is None else None

    def _resume_from(self, source: Checkpoint) -> None:
        self._storage.checkpoint_slots.acquire(source.slot)
        source.tier = PRIMARY  # where one prompt branched off, others will
        self._storage.totals.checkpoints_used += source.num_resumes == 0
        source.num_resumes += 1

    def _count_lookup(self, hit: PrefixHit, reused_tokens: int, max_reuse_tokens: int) -> None:
        totals = self._storage.totals
        totals.lookups += 1
        totals.looked_up_tokens += max_reuse_tokens
        totals.attention_hit_tokens += hit.attention_tokens
        totals.reused_tokens += reused_tokens

    def _count_state_lookup(self, hit: PrefixHit, branch_point: int | None, max_reuse_tokens: int) -> None:
        totals = self._storage.totals
        totals.state_lookups += 1
        totals.state_looked_up_tokens += max_reuse_tokens
        totals.state_hit_tokens += hit.state_tokens
        totals.resumable_tokens += hit.resumable_tokens
        totals.tombstone_tokens += hit.attention_tokens - hit.state_tokens
        totals.branch_points += branch_point is not None


def _checkpoints_through(last: Entry | None) -> list[Checkpoint]:
    """The checkpoints of a prefix in order."""
    found = [] if last is None else [entry.checkpoint for entry in last.upward() if entry.checkpoint is not None]
    found.reverse()
    return found


def _blocks_through(last: Entry | None) -> list[BlockId]:
    """The indexed blocks of a prefix in order, that of `last` at the end."""
    block_ids = [] if last is None else [entry.block for entry in last.upward()]
    block_ids.reverse()
    return block_ids
