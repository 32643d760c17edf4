"""Ids in lists that are linked through two arrays, so that no operation ever moves the others.

A dict whose room is used up is rebuilt, even if as many ids were removed as added. With 260,000 blocks that took 17 ms,
and 15 to 50 ms on the host of an H200, whose kernel maps memory slowly. All answers stood still meanwhile.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar, cast

from headrace.cache.errors import CorruptCache

Id = TypeVar("Id", bound=int)

IN_NONE = -1


class LinkedIds(Generic[Id]):
    """Ids 0 .. `num_ids` - 1, each in one of `num_lists` lists or in none. All but iteration is O(1)."""

    def __init__(self, num_ids: int, num_lists: int = 1) -> None:
        self._ends = range(num_ids, num_ids + num_lists)
        """One for each list, which is a ring: its end comes behind the last id and before the first."""
        self._next: list[int] = [IN_NONE] * num_ids + [*self._ends]
        self._previous: list[int] = [IN_NONE] * num_ids + [*self._ends]
        self._num = 0

    def __contains__(self, id_: Id) -> bool:
        return self._next[id_] != IN_NONE

    def __len__(self) -> int:
        """Ids in all lists together."""
        return self._num

    def add(self, id_: Id, to: int = 0) -> None:
        """Adds an id that is in no list at the end of this one. Raises CorruptCache if it is in one."""
        next_, previous = self._next, self._previous
        if next_[id_] != IN_NONE:
            raise CorruptCache(f"id {id_} is in a list already")
        end = self._ends[to]
        last = previous[end]
        next_[last] = previous[end] = id_
        previous[id_], next_[id_] = last, end
        self._num += 1

    def remove(self, id_: Id) -> None:
        """Removes an id from its list. Raises CorruptCache if it is in none."""
        next_, previous = self._next, self._previous
        after = next_[id_]
        if after == IN_NONE:
            raise CorruptCache(f"id {id_} is in no list")
        before = previous[id_]
        next_[before], previous[after] = after, before
        next_[id_] = IN_NONE
        self._num -= 1

    def in_order(self, of: int = 0) -> Iterator[Id]:
        """The ids of a list from its first on; the list must not change meanwhile."""
        end = self._ends[of]
        id_ = self._next[end]
        while id_ != end:
            yield cast(Id, id_)
            id_ = self._next[id_]
