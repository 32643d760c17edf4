"""The nodes that hold each prefix key: one table for all nodes, in which a node is a bit of each key's mask.

A set of keys for each node would hold each key that they share as often as there are nodes, and be asked as often.
Removing a node costs nothing at once: its bit is left in place, no longer asked for, and swept out a little with every
update; only then is it given to another node. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from headrace.cache.key_table import KeyTable
from headrace.cache.types import PrefixKey

SWEPT_AT_ONCE = 2048

Mask = int
"""A set of nodes, a bit for each."""


class KeyHolders:
    """Holders by key."""

    def __init__(self) -> None:
        self._masks: KeyTable[Mask] = KeyTable()

    def add(self, keys: Iterable[PrefixKey], bit: Mask) -> int:
        """Adds a holder of these keys; returns of how many it was none."""
        parts, num_added = self._masks.parts, 0
        for key in keys:
            masks = parts[key[0]]
            known = masks.get(key, 0)
            if not known & bit:
                masks[key] = known | bit if known else bit  # the same object for all keys of one node alone
                num_added += 1
        return num_added

    def discard(self, keys: Iterable[PrefixKey], bit: Mask) -> int:
        """Removes a holder of these keys; returns of how many it was one."""
        parts, num_removed = self._masks.parts, 0
        for key in keys:
            known = parts[key[0]].get(key, 0)
            if known & bit:
                self._drop(key, known, bit)
                num_removed += 1
        return num_removed

    def __len__(self) -> int:
        return len(self._masks)

    def prefix_lengths(self, keys: Sequence[PrefixKey], limit: int, nodes: Mask) -> Iterator[tuple[Mask, int]]:
        """Nodes by how many of the first `limit` keys they hold, those that hold none left out.

        keys   one chain; a node that holds one holds all before it, so that bisection finds where nodes part
        """
        first = self.holders(keys[0]) & nodes if limit else 0
        parts = [(1, limit + 1, first)] if first else []  # of nodes that hold at least so many, and fewer than that
        while parts:
            low, high, those = parts.pop()
            while high - low > 1:
                middle = (low + high) // 2
                deeper = self.holders(keys[middle - 1]) & those
                if not deeper:
                    high = middle
                    continue
                if shallower := those & ~deeper:
                    parts.append((low, middle, shallower))
                low, those = middle, deeper
            yield those, low

    def holders(self, key: PrefixKey) -> Mask:
        return self._masks.parts[key[0]].get(key, 0)

    def deepest_held(self, keys: Sequence[PrefixKey], position: int) -> int:
        """The last position up to this one whose key has holders; 0 if there is none."""
        parts = self._masks.parts
        for place in range(position, 0, -1):
            key = keys[place - 1]
            if key in parts[key[0]]:
                return place
        return 0

    def sweep(self, key: PrefixKey, nodes: Mask) -> None:
        """Removes these holders of a key, if they are."""
        known = self.holders(key)
        if known & nodes:
            self._drop(key, known, nodes)

    def __iter__(self) -> Iterator[PrefixKey]:
        """All keys; of those that are added or removed meanwhile some may come, and some not."""
        return self._masks.keys_by_parts()

    def _drop(self, key: PrefixKey, known: Mask, nodes: Mask) -> None:
        if left := known & ~nodes:
            self._masks[key] = left
        else:
            del self._masks[key]


class CacheTable:
    """Holders of blocks and of checkpoints, and the bits of nodes.

    generation   another one whenever a bit has become, or is no longer, that of a node whose cache is known
    """

    def __init__(self) -> None:
        self.blocks = KeyHolders()
        self.checkpoints = KeyHolders()
        self.generation = 0
        self._free_bits: list[Mask] = []
        self._num_bits = 0
        self._retired: Mask = 0
        self._sweeping: Mask = 0
        self._unswept: Iterator[tuple[KeyHolders, PrefixKey]] = iter(())

    def new_bit(self) -> Mask:
        """A bit that no key has."""
        self.generation += 1
        if self._free_bits:
            return self._free_bits.pop()
        self._num_bits += 1
        return 1 << (self._num_bits - 1)

    def retire(self, bit: Mask) -> None:
        """Gives a bit back, whose keys are swept later."""
        self.generation += 1
        self._retired |= bit

    def sweep(self) -> None:
        """Sweeps a few keys, if any are left of bits that were given back."""
        if not self._sweeping and not self._retired:
            return
        if not self._sweeping:
            self._sweeping, self._retired = self._retired, 0
            both = (self.blocks, self.checkpoints)  # nobody adds a bit that was given back to a key any more
            self._unswept = ((holders, key) for holders in both for key in holders)
        num_swept = 0
        for holders, key in islice(self._unswept, SWEPT_AT_ONCE):
            holders.sweep(key, self._sweeping)
            num_swept += 1
        if num_swept < SWEPT_AT_ONCE:
            self._free_bits += bits_of(self._sweeping)
            self._sweeping = 0


def bits_of(mask: Mask) -> list[Mask]:
    """The single bits of a mask."""
    bits = []
    while mask:
        lowest = mask & -mask
        bits.append(lowest)
        mask ^= lowest
    return bits
