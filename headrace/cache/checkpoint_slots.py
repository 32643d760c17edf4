"""Checkpoints' slots: a state becomes a checkpoint with the slot that it is in, or as a packed copy in another pool.

Both ways are asked the same; which one a cache goes is decided when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.cache.claims import Claim
from headrace.cache.errors import CorruptCache, NotHeld
from headrace.cache.index import Checkpoint, Entry
from headrace.cache.storage import Storage
from headrace.cache.types import PRIMARY, SlotId, Tier

PREFIX_SHARE = 2
"""Once no slot is free, the checkpoints along one prefix fill at most 1/PREFIX_SHARE of them: neither a long prompt
nor a chat of many turns can drive out all others'."""


@dataclass(frozen=True)
class PackedPool:
    """A pool of packed checkpoints, whose slots are numbered after those of running states.

    num_slots           of this pool
    num_emission_slots  slots beside those of running states, for states from kernels until they are packed
    pack                copies a state, first argument, to a packed slot, second argument, behind all that was launched
    unpack              copies a packed slot, first argument, to a state, second argument, likewise
    """

    num_slots: int
    num_emission_slots: int
    pack: Callable[[SlotId, SlotId], None]
    unpack: Callable[[SlotId, SlotId], None]


class CheckpointSlots(Protocol):
    """Moves between claims' slots and checkpoints."""

    @property
    def num_idle(self) -> int:
        """Slots in use that nobody holds: set aside for states that kernels will emit."""
        ...

    def has_room(self, source: Checkpoint | None) -> bool:
        """True if `start` finds a slot for a claim that resumes from `source`."""
        ...

    def start(self, source: Checkpoint | None) -> tuple[SlotId, Checkpoint | None]:
        """A slot for a claim, and the checkpoint that its first step reads instead, if it does.

        source   referenced by the caller; the reference stays if it is returned
        """
        ...

    def reserve(self, claim: Claim, tier: Tier) -> SlotId | None:
        """A slot for a state that a kernel will emit; None if there is none."""
        ...

    def give_back(self, claim: Claim, slot: SlotId) -> None:
        """Frees what `reserve` returned. Raises NotHeld."""
        ...

    def publish(self, claim: Claim, entry: Entry, slot: SlotId, tier: Tier) -> Checkpoint | None:
        """Makes the state in a reserved slot a checkpoint, or gives the slot back and returns None."""
        ...

    def publish_running(self, claim: Claim, entry: Entry, tier: Tier) -> Checkpoint | None:
        """Makes the running state a checkpoint; None, and no change, if there is no slot."""
        ...


class _Slots:
    """The pool that checkpoints lie in, and the share of it that one prefix gets."""

    def __init__(self, storage: Storage, num_slots: int) -> None:
        self._storage = storage
        self._max_checkpoints = max(1, num_slots // PREFIX_SHARE)

    def _reserve(self, claim: Claim, tier: Tier) -> SlotId | None:
        while not self._storage.checkpoint_slots.num_free and claim.num_checkpoints >= self._max_checkpoints:
            if tier < PRIMARY or not self._give_up_deepest(claim):
                return None
        slot = self._storage.reserve_slot(tier)
        claim.num_reserved += slot is not None
        return slot

    def _give_up_deepest(self, claim: Claim) -> bool:
        """Gives up a prefix's deepest grid checkpoint, or else its deepest: others are likelier to share shallow ones.

        One that is gone already is taken off the claim's list instead. False if there is none, all of them are
        referenced, or the deepest are still being written.
        """
        storage, own = self._storage, claim.checkpoints
        for i in _grid_first(own, with_primary=not claim.num_reserved):
            if storage.forget_checkpoint(own[i]) or storage.index.find(own[i]) is None:
                del own[i]
                return True
        return False

    def _publish(self, claim: Claim, entry: Entry, slot: SlotId, tier: Tier) -> Checkpoint:
        checkpoint = self._storage.index_state(entry, slot, tier, min(claim.primary_tokens, entry.num_tokens - 1))
        claim.num_reserved -= 1
        claim.checkpoints.append(checkpoint)
        if tier == PRIMARY:
            claim.primary_tokens = entry.num_tokens
        return checkpoint


class DonatedSlots(_Slots):
    """One pool of slots for running states and checkpoints: nothing is copied."""

    num_idle = 0

    def has_room(self, source: Checkpoint | None) -> bool:
        kept = () if source is None else (source.slot,)
        return self._storage.checkpoint_slots.capacity(keeping=kept) >= 1

    def start(self, source: Checkpoint | None) -> tuple[SlotId, Checkpoint | None]:
        slot = self._storage.reserve_slot()
        if slot is None:
            raise CorruptCache("a slot was promised but is not there")
        return slot, source

    def reserve(self, claim: Claim, tier: Tier) -> SlotId | None:
        return self._reserve(claim, tier)

    def give_back(self, claim: Claim, slot: SlotId) -> None:
        self._storage.drop_slot(slot)
        claim.num_reserved -= 1

    def publish(self, claim: Claim, entry: Entry, slot: SlotId, tier: Tier) -> Checkpoint | None:
        checkpoint = self._publish(claim, entry, slot, tier)
        self._storage.checkpoint_slots.drop(slot)
        return checkpoint

    def publish_running(self, claim: Claim, entry: Entry, tier: Tier) -> Checkpoint | None:
        """The next step reads the checkpoint (`claim.source`, referenced) and writes a newly reserved slot."""
        slot = self._reserve(claim, tier)
        if slot is None:
            return None
        claim.source, claim.slot = self._publish(claim, entry, claim.slot, tier), slot
        return claim.source


class PackedSlots(_Slots):
    """Checkpoints in a pool of their own, in fewer bytes: a claim unpacks the one that it resumes from."""

    def __init__(self, storage: Storage, pool: PackedPool) -> None:
        super().__init__(storage, pool.num_slots)
        self._pool = pool
        self._idle = storage.running_slots.reserve(pool.num_emission_slots) or []

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def has_room(self, source: Checkpoint | None) -> bool:
        return self._storage.running_slots.num_free >= 1

    def start(self, source: Checkpoint | None) -> tuple[SlotId, Checkpoint | None]:
        slots = self._storage.running_slots.reserve(1)
        if slots is None:
            raise CorruptCache("a slot was promised but is not there")
        if source is not None:
            self._pool.unpack(source.slot, slots[0])
            self._storage.checkpoint_slots.drop(source.slot)  # what is packed there next is launched after this copy
        return slots[0], None

    def reserve(self, claim: Claim, tier: Tier) -> SlotId | None:
        return self._idle.pop() if self._idle else None

    def give_back(self, claim: Claim, slot: SlotId) -> None:
        if slot in self._idle:
            raise NotHeld(f"slot {slot} was given back already")
        self._idle.append(slot)

    def publish(self, claim: Claim, entry: Entry, slot: SlotId, tier: Tier) -> Checkpoint | None:
        checkpoint = self._packed(claim, entry, slot, tier)
        self.give_back(claim, slot)
        return checkpoint

    def publish_running(self, claim: Claim, entry: Entry, tier: Tier) -> Checkpoint | None:
        return self._packed(claim, entry, claim.slot, tier)

    def _packed(self, claim: Claim, entry: Entry, slot: SlotId, tier: Tier) -> Checkpoint | None:
        packed = self._reserve(claim, tier)
        if packed is None:
            return None
        self._pool.pack(slot, packed)
        checkpoint = self._publish(claim, entry, packed, tier)
        self._storage.checkpoint_slots.drop(packed)
        return checkpoint


def _grid_first(own: Sequence[Checkpoint], *, with_primary: bool) -> Iterator[int]:
    """Indexes into `own`, deepest first: the grid checkpoints that no request resumed from, then the primary ones."""
    yield from (i for i in reversed(range(len(own))) if own[i].tier < PRIMARY)
    if with_primary:
        yield from (i for i in reversed(range(len(own))) if own[i].tier == PRIMARY)
