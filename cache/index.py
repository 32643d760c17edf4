"""The prefix index: which prefix is in which block, and which of them have a checkpoint.

A tree of entries, one for each cached full block, also reachable by key, by block and by checkpoint slot. It
is prefix-closed: the parent of an indexed entry is indexed. Two things follow. The longest match of a chain
of keys is found by bisection, because if key `i` is known so is every key before it. And an entry is removed
with everything below it in the tree, because nothing could find that any more; each entry is removed once, so
this is O(1) amortised.

The index knows nothing of references; `cache.prefix_cache` keeps it in step with the pools.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cache.errors import CorruptCache
from cache.types import BlockId, PrefixKey, SlotId, Tier


@dataclass(slots=True, eq=False)
class Checkpoint:
    """An immutable state at exactly `num_tokens` of the prefix `key`, kept in `slot`.

    tier           how firmly it is kept: `FIRM` or less
    above_tokens   where the firm checkpoint above it stood when it was published; from there to here is what
                   it saves whoever resumes from it
    """

    key: PrefixKey
    num_tokens: int
    slot: SlotId
    tier: Tier
    above_tokens: int
    num_resumes: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """One cached block: the last `block_size` of the `num_tokens` tokens that `key` names."""

    key: PrefixKey
    parent: "Entry | None"
    num_tokens: int
    block: BlockId
    children: set["Entry"] = field(default_factory=set)
    checkpoint: Checkpoint | None = None
    indexed: bool = True

    def upward(self) -> Iterator["Entry"]:
        """This entry, its parent and so on to the first block of the prompt."""
        entry: Entry | None = self
        while entry is not None:
            yield entry
            entry = entry.parent

    def deepest_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint at or above this entry."""
        return next((entry.checkpoint for entry in self.upward() if entry.checkpoint is not None), None)


class PrefixIndex:
    """Entries by key, block and checkpoint slot."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[PrefixKey, Entry] = {}
        self._by_block: dict[BlockId, Entry] = {}
        self._by_slot: dict[SlotId, Entry] = {}

    def get(self, key: PrefixKey) -> Entry | None:
        return self._entries.get(key)

    def deepest(self, keys: Sequence[PrefixKey], limit: int) -> Entry | None:
        """The entry of the longest indexed prefix within the first `limit` keys, which must be one chain."""
        found = bisect_left(
            keys, True, hi=max(0, min(limit, len(keys))), key=lambda key: key not in self._entries
        )
        return self._entries[keys[found - 1]] if found else None

    def by_block(self, block: BlockId) -> Entry:
        return self._by_block[block]

    def by_slot(self, slot: SlotId) -> Entry:
        return self._by_slot[slot]

    def find(self, checkpoint: Checkpoint) -> Entry | None:
        """The entry of this very checkpoint; None once it is forgotten, whatever its slot holds now."""
        entry = self._by_slot.get(checkpoint.slot)
        return entry if entry is not None and entry.checkpoint is checkpoint else None

    def add(self, key: PrefixKey, parent: Entry | None, block: BlockId) -> Entry:
        """Index `block` under a new key, below `parent`, which must be indexed."""
        if key in self._entries or (parent is not None and not parent.indexed):
            raise CorruptCache(f"block {block} cannot be indexed: its key is known or its parent is not")
        num_tokens = (parent.num_tokens if parent else 0) + self._block_size
        entry = Entry(key, parent, num_tokens, block)
        if parent is not None:
            parent.children.add(entry)
        self._entries[key] = self._by_block[block] = entry
        return entry

    def attach(self, entry: Entry, checkpoint: Checkpoint) -> None:
        """Make `checkpoint` findable at `entry`, which must be indexed and have none."""
        if not entry.indexed or entry.checkpoint is not None:
            raise CorruptCache(f"a checkpoint at {entry.num_tokens} tokens cannot be attached to this entry")
        entry.checkpoint = checkpoint
        self._by_slot[checkpoint.slot] = entry

    def detach(self, entry: Entry) -> Checkpoint:
        """Take the checkpoint of `entry`, which must have one, out of the index and return it."""
        checkpoint, entry.checkpoint = entry.checkpoint, None
        if checkpoint is None:
            raise CorruptCache(f"there is no checkpoint at {entry.num_tokens} tokens to detach")
        del self._by_slot[checkpoint.slot]
        return checkpoint

    def remove(self, entry: Entry) -> list[Entry]:
        """Remove `entry` and all below it; return them, each with its checkpoint, which is removed too."""
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        removed, pending = [], [entry]
        while pending:
            current = pending.pop()
            pending.extend(current.children)
            current.children.clear()
            current.indexed = False
            del self._entries[current.key], self._by_block[current.block]
            if current.checkpoint is not None:
                del self._by_slot[current.checkpoint.slot]
            removed.append(current)
        return removed

    def entries(self) -> Iterator[Entry]:
        """All entries, a parent always before its children."""
        return iter(self._entries.values())

    def keys(self) -> list[PrefixKey]:
        """The keys of all entries, a parent's always before its children's; a copy."""
        return list(self._entries)

    @property
    def num_blocks(self) -> int:
        return len(self._entries)

    @property
    def num_checkpoints(self) -> int:
        return len(self._by_slot)

    def checkpoints(self) -> Iterator[Checkpoint]:
        return (entry.checkpoint for entry in self._by_slot.values() if entry.checkpoint is not None)

    def check(self) -> None:
        """Raise CorruptCache unless the tree is prefix-closed and the three ways to an entry agree."""
        for key, entry in self._entries.items():
            if not entry.indexed or entry.key != key or self._by_block.get(entry.block) is not entry:
                raise CorruptCache(f"entry of block {entry.block} is not found by its key and block")
            parent = entry.parent
            if parent is not None and (not parent.indexed or entry not in parent.children):
                raise CorruptCache(f"entry of block {entry.block} has no indexed parent")
            checkpoint = entry.checkpoint
            if checkpoint is None:
                continue
            if self._by_slot.get(checkpoint.slot) is not entry or checkpoint.num_tokens != entry.num_tokens:
                raise CorruptCache(f"checkpoint in slot {checkpoint.slot} is not where its entry says")
        if len(self._by_block) != len(self._entries):
            raise CorruptCache("the index holds a block whose key is gone")
        if any(entry.checkpoint is None or not entry.indexed for entry in self._by_slot.values()):
            raise CorruptCache("the index holds a slot whose checkpoint is gone")
