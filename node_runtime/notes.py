"""The note that rides on a hand-over's last message: what the decode node needs beside the state."""

from __future__ import annotations

import struct

_FORMAT = struct.Struct("<I")


def encode_note(first_token: int) -> bytes:
    """The token that the prefill node sampled; decode goes on after it."""
    return _FORMAT.pack(first_token)


def decode_note(note: bytes) -> int:
    """Raises ValueError for a note of another version."""
    if len(note) != _FORMAT.size:
        raise ValueError(f"a note of {len(note)} bytes, not {_FORMAT.size}: the prefill node runs another version")
    (first_token,) = _FORMAT.unpack(note)
    return int(first_token)
