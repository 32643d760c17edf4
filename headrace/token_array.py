"""Token ids as one value: packed into bytes, as they are hashed and as they travel.

A list of 16,000 ids is 16,000 objects: making, sending or reading it takes an event loop a millisecond, and each full
garbage collection visits all of them. Packed, that is one object and a copy of 64 KiB.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

TOKEN_BYTES = 4
_PACKED = np.dtype("<u4")
_SHOWN = 8
"""Ids that a repr shows."""


class BadTokenIds(ValueError):
    """Ids that are no unsigned 32-bit integers, or bytes that are no ids."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """The ids as little-endian unsigned 32-bit integers; raises BadTokenIds for one that does not fit."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise BadTokenIds(f"token ids must be unsigned 32-bit integers: {error}") from error
    return _swapped(packed).tobytes()  # numpy's ways take twice as long for one id, which is the most frequent number


@dataclass(frozen=True, slots=True, repr=False)
class TokenArray(Sequence[int]):
    """Token ids that never change; equal ids are equal values. Raises BadTokenIds for bytes that are no whole ids.

    packed   little-endian unsigned 32-bit integers
    """

    packed: bytes = b""

    def __post_init__(self) -> None:
        if len(self.packed) % TOKEN_BYTES:
            raise BadTokenIds(f"{len(self.packed)} bytes are no token ids: each has {TOKEN_BYTES} bytes")

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenArray:
        """The ids as one value; raises BadTokenIds for one that is no unsigned 32-bit integer."""
        return ids if isinstance(ids, TokenArray) else cls(pack_ids(ids))

    @property
    def ids(self) -> NDArray[np.uint32]:
        """The ids, in the same memory, which cannot be written."""
        return np.frombuffer(self.packed, _PACKED)

    @property
    def largest(self) -> int:
        """The largest id; 0 if there is none."""
        return int(self.ids.max(initial=0))

    def followed_by(self, ids: Iterable[int]) -> TokenArray:
        """These ids, then others."""
        return TokenArray(self.packed + pack_ids(ids))

    def growing(self) -> array[int]:
        """A copy that can grow."""
        return _swapped(array("I", self.packed))

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenArray: ...
    def __getitem__(self, index: int | slice) -> int | TokenArray:
        chosen = self.ids[index]
        return TokenArray(chosen.tobytes()) if isinstance(index, slice) else int(chosen)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.ids[:_SHOWN]))
        return f"TokenArray({len(self)} ids: {shown}{', ...' if len(self) > _SHOWN else ''})"


def _swapped(ids: array[int]) -> array[int]:
    """The same array, in the other byte order where this machine's is not little-endian."""
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
