"""The layout of cache bytes that two nodes must agree on before one's can be copied into the other.

A `CacheLayout` is a value without tensors: it travels in reservations and registrations, sizes both pools, and names
the first field in which two nodes differ. Which differences are converted: headrace/cache/conversion.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod

LAYOUT_VERSION = 1

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class CacheLayout:
    """The bytes of one block and of one state.

    A block is `[num_attention_layers, 2, block_size, num_kv_heads, head_dim]` of `dtype`, contiguous.
    A state is `conv_shape` (state layers, channels, kernel - 1) of `dtype`, then `rec_shape`
    (state layers, heads, ...) of `state_dtype`, contiguous.
    """

    fingerprint: str
    dtype: str
    state_dtype: str
    block_size: int
    num_attention_layers: int
    num_kv_heads: int
    head_dim: int
    conv_shape: tuple[int, ...]
    rec_shape: tuple[int, ...]
    version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        for name in ("dtype", "state_dtype"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise ValueError(f"{name} {getattr(self, name)!r}: use one of {', '.join(DTYPE_BYTES)}")
        if self.block_size < 1:
            raise ValueError(f"block_size {self.block_size}: must be at least 1")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all attention layers."""
        elements = self.num_attention_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def conv_bytes(self) -> int:
        """Bytes of one state's conv windows, all state layers."""
        return prod(self.conv_shape) * DTYPE_BYTES[self.dtype]

    @property
    def rec_bytes(self) -> int:
        """Bytes of one state's recurrent part, all state layers."""
        return prod(self.rec_shape) * DTYPE_BYTES[self.state_dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of one state: conv windows, then the recurrent part."""
        return self.conv_bytes + self.rec_bytes

    def on_wire(self, state_dtype: str | None) -> CacheLayout:
        """The layout of messages to a node of this layout, with states as `state_dtype`; None: in its own dtype."""
        return self if state_dtype is None else replace(self, state_dtype=state_dtype)

    @property
    def max_state_bytes(self) -> int:
        """The most bytes of one state on the wire, over all dtypes that a peer can choose."""
        return max(replace(self, state_dtype=dtype).state_bytes for dtype in DTYPE_BYTES)

    def mismatch(self, other: CacheLayout) -> str | None:
        """The first differing field with both values, or None when the layouts agree."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} {mine} != {theirs}"
        return None
