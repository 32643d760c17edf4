"""The layout of cache bytes that two nodes must agree on before one's can be copied into the other.

A `CacheLayout` is a value without tensors: it travels in reservations and registrations, sizes both pools, and names
the first group and field in which two nodes differ. Which differences are converted: headrace/cache/conversion.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, TypeAlias

LAYOUT_VERSION = 2

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

SCALED_STATES = ("int8", "fp8")
"""Formats of recurrent parts with one byte an element, and a float32 scale for each row of the last dimension."""

STATE_FORMATS = (*DTYPE_BYTES, *SCALED_STATES)
"""All formats in which recurrent parts can travel or be kept."""


@dataclass(frozen=True)
class AttentionGroup:
    """Attention layers that keep vectors of the same size for each token.

    num_heads   heads of keys and values; 1 for a latent vector
    num_planes  vectors of a head: 2, its key and its value; 1, a latent vector that stands for both
    """

    num_layers: int
    num_heads: int
    head_dim: int
    num_planes: int = 2

    @property
    def token_elements(self) -> int:
        """Elements of one token, all layers of the group."""
        return self.num_layers * self.num_planes * self.num_heads * self.head_dim


@dataclass(frozen=True)
class StateGroup:
    """Layers with states of the same shape. Each part's shape is that of one layer; (0,): there is no such part.

    conv_shape  (channels, taps - 1) of the conv window, in the model's dtype
    rec_shape   (heads, ...) of the recurrent part, in the state's dtype
    """

    num_layers: int
    conv_shape: tuple[int, ...] = (0,)
    rec_shape: tuple[int, ...] = (0,)

    @property
    def num_scales(self) -> int:
        """Rows of the recurrent part, all layers."""
        return self.num_layers * prod(self.rec_shape[:-1]) if prod(self.rec_shape) else 0


CacheGroup: TypeAlias = AttentionGroup | StateGroup
"""The layers that share one kind of cache."""


@dataclass(frozen=True)
class CacheLayout:
    """The bytes of one block and of one state, each contiguous: those of its groups, one after the other.

    An attention group's part of a block is `[num_layers, num_planes, block_size, num_heads, head_dim]` of `dtype`.
    A state group's part of a state is `[num_layers, *conv_shape]` of `dtype`, then `[num_layers, *rec_shape]` of
    `state_dtype`; one of SCALED_STATES is followed by its scales, float32 `[num_layers, *rec_shape[:-1]]`.
    """

    fingerprint: str
    dtype: str
    state_dtype: str
    block_size: int
    attention_groups: tuple[AttentionGroup, ...]
    state_groups: tuple[StateGroup, ...]
    version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        for name, known in (("dtype", tuple(DTYPE_BYTES)), ("state_dtype", STATE_FORMATS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: use one of {', '.join(known)}")
        if self.block_size < 1:
            raise ValueError(f"block_size {self.block_size}: must be at least 1")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all attention groups."""
        return sum(self.block_elements(group) for group in self.attention_groups) * DTYPE_BYTES[self.dtype]

    def block_elements(self, group: AttentionGroup) -> int:
        """Elements of one group's part of a block."""
        return self.block_size * group.token_elements

    def conv_bytes(self, group: StateGroup) -> int:
        """Bytes of the conv windows in one group's part of a state, all its layers."""
        return group.num_layers * prod(group.conv_shape) * DTYPE_BYTES[self.dtype]

    def rec_bytes(self, group: StateGroup) -> int:
        """Bytes of the recurrent part in one group's part of a state, all its layers."""
        num_elements = group.num_layers * prod(group.rec_shape)
        if self.state_dtype in SCALED_STATES:
            return num_elements + group.num_scales * DTYPE_BYTES["float32"]
        return num_elements * DTYPE_BYTES[self.state_dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, all state groups."""
        return sum(self.conv_bytes(group) + self.rec_bytes(group) for group in self.state_groups)

    def on_wire(self, state_dtype: str | None) -> CacheLayout:
        """This layout with states as `state_dtype`, one of STATE_FORMATS; None: in its own dtype."""
        return self if state_dtype is None else replace(self, state_dtype=state_dtype)

    @property
    def max_state_bytes(self) -> int:
        """The most bytes of one state on the wire, over all formats that a peer can choose."""
        return max(replace(self, state_dtype=each).state_bytes for each in STATE_FORMATS)

    def mismatch(self, other: CacheLayout) -> str | None:
        """The first difference, with both values and its group if it has one, or None when the layouts agree."""
        return next(self._differences(other), None)

    def _differences(self, other: CacheLayout) -> Iterator[str]:
        # The version first: a peer of another one may not have sent the rest.
        yield from _differences(self, other, ("version", "fingerprint", "dtype", "state_dtype", "block_size"))
        for kind in ("attention", "state"):
            mine, theirs = getattr(self, f"{kind}_groups"), getattr(other, f"{kind}_groups")
            if len(mine) != len(theirs):
                yield f"{len(mine)} {kind} groups != {len(theirs)}"
            for number, (group, peers) in enumerate(zip(mine, theirs, strict=False)):
                names = [field.name for field in fields(group)]
                yield from (f"{kind} group {number}: {each}" for each in _differences(group, peers, names))


def _differences(mine: Any, theirs: Any, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if getattr(mine, name) != getattr(theirs, name):
            yield f"{name} {getattr(mine, name)} != {getattr(theirs, name)}"
