"""Refcounted pools of blocks and of state slots.

An id is in exactly one of three places:

    free      nobody refers to it, and its contents mean nothing
    cached    only the prefix index refers to it; cached ids are kept in eviction order
    in use    a claim or a lease holds a reference; the index may refer to it as well

A pool does not evict by itself, because the index must forget the id, too. Slots: `first()` returns the next one to
evict, and `uncache()` frees it once the index has forgotten it. Blocks: `evict()` frees the next ones, and the index
forgets them afterwards. Every operation is O(1) for each id.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.cache.errors import CorruptCache, NotHeld
from headrace.cache.eviction import BlockOrder, EvictionOrder
from headrace.cache.types import PRIMARY, BlockId, SlotId, Tier

Id = TypeVar("Id", bound=int)


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Counts of a pool's ids by place; free + cached + in_use = total."""

    free: int
    cached: int
    in_use: int


class _Pool(Generic[Id]):
    def __init__(self, ids: list[Id], order: EvictionOrder[Id]) -> None:
        self._ids = ids
        self._total = len(ids)
        self._free = ids[::-1]
        self._end = max(ids, default=-1) + 1
        self._references = [0] * self._end
        self._indexed = bytearray(self._end)
        self._unused = order

    @property
    def num_free(self) -> int:
        return len(self._free)

    def counts(self) -> PoolCounts:
        free, cached = len(self._free), len(self._unused)
        return PoolCounts(free=free, cached=cached, in_use=self._total - free - cached)

    def capacity(self, keeping: Iterable[Id] = ()) -> int:
        """How many ids could be reserved, evicting if need be, while those in `keeping`, cached or in use, stay."""
        references = self._references
        return len(self._free) + len(self._unused) - [references[id_] for id_ in keeping].count(0)

    def reserve(self, num: int) -> list[Id] | None:
        """Takes `num` free ids, each with one reference; None and no change if fewer are free."""
        free, references = self._free, self._references
        num_left = len(free) - num
        if num_left < 0:
            return None
        ids = free[num_left:]
        ids.reverse()
        del free[num_left:]
        for id_ in ids:
            references[id_] = 1
        return ids

    def acquire(self, *ids: Id) -> None:
        """Adds a reference to each id, which is cached or in use. Raises NotHeld at one that is free."""
        references, indexed, unused = self._references, self._indexed, self._unused
        for id_ in ids:
            if not references[id_]:
                if not indexed[id_]:
                    raise NotHeld(f"{type(self).__name__}: {id_} is free and cannot be shared: reserve it")
                unused.remove(id_)
            references[id_] += 1

    def drop(self, *ids: Id) -> None:
        """Gives back a reference to each id; with its last one an id becomes cached, used just now, or free. Raises
        NotHeld at one that has none."""
        references, indexed, unused = self._references, self._indexed, self._unused
        for id_ in ids:
            num_left = references[id_] - 1
            if num_left < 0:
                raise NotHeld(f"{type(self).__name__}: {id_} was given back without being held: released twice?")
            references[id_] = num_left
            if indexed[id_]:
                unused.count_use(id_)
                if not num_left:
                    unused.add(id_)
            elif not num_left:
                self._free.append(id_)

    def cache(self, *ids: Id) -> None:
        """The index refers to each id from now on. Raises NotHeld at one that is not in use, or indexed already."""
        references, indexed = self._references, self._indexed
        for id_ in ids:
            if not references[id_] or indexed[id_]:
                raise NotHeld(f"{type(self).__name__}: {id_} cannot be cached: it is free or already cached")
            indexed[id_] = True

    def uncache(self, id_: Id) -> None:
        """The index has forgotten `id_`: it is free now, or with its last reference. Raises NotHeld."""
        if not self._indexed[id_]:
            raise NotHeld(f"{type(self).__name__}: {id_} cannot be evicted: it is not cached")
        self._indexed[id_] = False
        if not self._references[id_]:
            self._unused.remove(id_)
            self._free.append(id_)
        self._unused.forget(id_)

    def touch(self, id_: Id) -> None:
        """Counts a use of `id_`, just now if it is cached; an id in use is used last when it is given back."""
        self._unused.count_use(id_)
        if id_ in self._unused:
            self._unused.touch(id_)

    def first(self, up_to: Tier = PRIMARY) -> Id | None:
        """The next id to evict among the tiers up to this one; None if there is none."""
        return self._unused.first(up_to)

    def unused(self) -> list[Id]:
        """The cached ids in eviction order."""
        return list(self._unused)

    def indexed(self) -> set[Id]:
        """The ids that the index refers to, cached or in use."""
        return {id_ for id_ in self._ids if self._indexed[id_]}

    def is_referenced(self, id_: Id) -> bool:
        return self._references[id_] > 0

    def is_indexed(self, id_: Id) -> bool:
        return bool(self._indexed[id_])

    def check(self) -> None:
        """Raises CorruptCache unless free + cached + in use = total and each id is in exactly one place."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """Does what `check` does in slices of CHECK_SLICE ids, which take a millisecond or two each.

        The pool must not change between them; abandon the iterator if it has to.
        """
        name, is_free, num_cached = type(self).__name__, bytearray(self._end), 0
        for part in _slices(len(self._free)):
            for id_ in self._free[part]:
                if is_free[id_]:
                    raise CorruptCache(f"{name}: id {id_} is free twice")
                is_free[id_] = True
            yield
        for part in _slices(self._total):
            for id_ in self._ids[part]:
                is_cached, is_held = id_ in self._unused, self._references[id_] > 0
                if is_free[id_] + is_cached + is_held != 1:
                    raise CorruptCache(
                        f"{name}: id {id_} is in other than one place: free {is_free[id_]}, cached {is_cached}, in use "
                        f"{is_held}"
                    )
                if not is_held and self._indexed[id_] != is_cached:
                    raise CorruptCache(f"{name}: id {id_} is indexed and free, or cached and not indexed")
                num_cached += is_cached
            yield
        if num_cached != len(self._unused):
            raise CorruptCache(f"{name}: {len(self._unused)} ids are cached, {num_cached} of them in this pool")


CHECK_SLICE = 1024


def _slices(total: int) -> Iterator[slice]:
    return (slice(start, min(start + CHECK_SLICE, total)) for start in range(0, total, CHECK_SLICE))


class BlockPool(_Pool[BlockId]):
    """Attention blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, order: BlockOrder) -> None:
        super().__init__([BlockId(block) for block in range(num_blocks)], order)
        self._blocks = order

    def evict(self, num: int) -> list[BlockId]:
        """Frees the next `num` blocks to evict, or all that are cached, and returns them in order. The index must
        forget them."""
        evicted = self._blocks.pop(num)
        for block in evicted:
            self._indexed[block] = False
            self._blocks.forget(block)
        self._free += evicted
        return evicted


class StatePool(_Pool[SlotId]):
    """State slots with these numbers."""

    def __init__(self, slots: range, order: EvictionOrder[SlotId]) -> None:
        super().__init__([SlotId(slot) for slot in slots], order)
