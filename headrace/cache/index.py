"""The prefix index: which prefix is in which block, and which prefixes have a checkpoint.

A tree of entries, one for each cached full block, also reachable by key, by block and by checkpoint slot. It is
prefix-closed: the parent of an indexed entry is indexed. Two things follow. The longest match of a chain of keys is
found by bisection, because if key `i` is known so is every key before it. And an entry is removed with everything
below it in the tree, because that could no longer be found; each entry is removed once, so this is O(1) amortised.

The index knows nothing of references; `headrace.cache.prefix_cache` keeps it in step with the pools.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.cache.errors import CorruptCache
from headrace.cache.key_table import KeyTable
from headrace.cache.types import BlockId, PrefixKey, SlotId, Tier


@dataclass(slots=True, eq=False)
class Checkpoint:
    """An immutable state at exactly `num_tokens` of the prefix `key`, kept in `slot`.

    tier           `PRIMARY` or less; lower tiers are evicted first
    above_tokens   position of the primary checkpoint above it when it was published; resuming from this one saves the
                   tokens from there to here
    is_proven      a token was drawn behind it (headrace/cache/proof.py)
    """

    key: PrefixKey
    num_tokens: int
    slot: SlotId
    tier: Tier
    above_tokens: int
    num_resumes: int = 0
    is_proven: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """One cached block: the last `block_size` of the `num_tokens` tokens that `key` names.

    `is_proven` once a token was drawn behind it (headrace/cache/proof.py).

    Its children are a list linked through themselves: a set in each of a million entries would keep the garbage
    collector as busy as the entries do.
    """

    key: PrefixKey
    parent: "Entry | None"
    num_tokens: int
    block: BlockId
    first_child: "Entry | None" = None
    previous_sibling: "Entry | None" = None
    next_sibling: "Entry | None" = None
    checkpoint: Checkpoint | None = None
    indexed: bool = True
    is_proven: bool = False

    def children(self) -> Iterator["Entry"]:
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling

    def adopt(self, child: "Entry") -> None:
        """Links `child`, whose parent this is, among its children."""
        child.next_sibling = self.first_child
        if self.first_child is not None:
            self.first_child.previous_sibling = child
        self.first_child = child

    def leave_parent(self) -> None:
        """Unlinks the entry from its parent's children; `parent` itself stays set."""
        before, after = self.previous_sibling, self.next_sibling
        if before is not None:
            before.next_sibling = after
        elif self.parent is not None:
            self.parent.first_child = after
        if after is not None:
            after.previous_sibling = before
        self.previous_sibling = self.next_sibling = None

    def upward(self) -> list["Entry"]:
        """This entry, its parent and so on to the first block of the prompt."""
        found, parent = [self], self.parent
        while parent is not None:
            found.append(parent)
            parent = parent.parent
        return found

    def deepest_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint at or above this entry."""
        entry: Entry | None = self
        while entry is not None and entry.checkpoint is None:
            entry = entry.parent
        return None if entry is None else entry.checkpoint


class PrefixIndex:
    """Entries by key, block and checkpoint slot."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._entries: KeyTable[Entry] = KeyTable()
        self._by_block: list[Entry | None] = [None] * num_blocks
        self._by_slot: dict[SlotId, Entry] = {}

    def get(self, key: PrefixKey) -> Entry | None:
        return self._entries.get(key)

    def deepest(self, keys: Sequence[PrefixKey], limit: int) -> Entry | None:
        """The entry of the longest indexed prefix within the first `limit` keys, which must be one chain."""
        found = bisect_left(keys, True, hi=max(0, min(limit, len(keys))), key=lambda key: key not in self._entries)
        return self._entries[keys[found - 1]] if found else None

    def by_block(self, block: BlockId) -> Entry:
        """The entry of a block. Raises CorruptCache if it has none."""
        entry = self._by_block[block]
        if entry is None:
            raise CorruptCache(f"block {block} is not in the index")
        return entry

    def by_slot(self, slot: SlotId) -> Entry:
        return self._by_slot[slot]

    def find(self, checkpoint: Checkpoint) -> Entry | None:
        """The entry of this very checkpoint; None once it is forgotten, whatever its slot holds now."""
        entry = self._by_slot.get(checkpoint.slot)
        return entry if entry is not None and entry.checkpoint is checkpoint else None

    def add_chain(self, keys: Sequence[PrefixKey], parent: Entry | None, blocks: Sequence[BlockId]) -> Entry | None:
        """Index `blocks` under new keys, the first below `parent`, which must be indexed; returns the last entry."""
        parts, by_block, size = self._entries.parts, self._by_block, self._block_size
        num_tokens = parent.num_tokens if parent is not None else 0
        for key, block in zip(keys, blocks, strict=True):
            part = parts[key[0]]
            if key in part or (parent is not None and not parent.indexed):
                raise CorruptCache(f"block {block} cannot be indexed: its key is known or its parent is not")
            num_tokens += size
            entry = Entry(key, parent, num_tokens, block)
            if parent is not None:
                parent.adopt(entry)
            part[key] = by_block[block] = parent = entry
        return parent

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
        """Remove `entry` and all below it; return them, parents first, with their checkpoints, removed as well."""
        entry.leave_parent()
        removed = [entry]
        for current in removed:
            if current.first_child is not None:
                removed.extend(current.children())
            # No links down or sideways remain, so reference counting frees the entries without the collector.
            current.first_child = current.previous_sibling = current.next_sibling = None
            current.indexed = False
            del self._entries[current.key]
            self._by_block[current.block] = None
            if current.checkpoint is not None:
                del self._by_slot[current.checkpoint.slot]
        return removed

    def entries(self) -> Iterator[Entry]:
        """All entries, in any order."""
        return self._entries.values()

    def keys(self) -> list[PrefixKey]:
        """The keys of all entries, in any order; a copy."""
        return self._entries.keys()

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
        num_children = 0
        for entry in self.entries():
            is_found = self._entries.get(entry.key) is entry and self._by_block[entry.block] is entry
            if not entry.indexed or not is_found:
                raise CorruptCache(f"entry of block {entry.block} is not found by its key and block")
            parent = entry.parent
            if parent is not None and not parent.indexed:
                raise CorruptCache(f"entry of block {entry.block} has no indexed parent")
            if any(child.parent is not entry or not child.indexed for child in entry.children()):
                raise CorruptCache(f"entry of block {entry.block} has a child that is not its own")
            num_children += sum(1 for _ in entry.children())
            checkpoint = entry.checkpoint
            if checkpoint is None:
                continue
            if self._by_slot.get(checkpoint.slot) is not entry or checkpoint.num_tokens != entry.num_tokens:
                raise CorruptCache(f"checkpoint in slot {checkpoint.slot} is not where its entry says")
        if num_children != sum(entry.parent is not None for entry in self.entries()):
            raise CorruptCache("an entry is not among its parent's children")
        if sum(entry is not None for entry in self._by_block) != len(self._entries):
            raise CorruptCache("the index holds a block whose key is gone")
        if any(entry.checkpoint is None or not entry.indexed for entry in self._by_slot.values()):
            raise CorruptCache("the index holds a slot whose checkpoint is gone")
