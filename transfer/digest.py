"""The digest of a message: XXH3-128 over its predecessor's digest, its envelope and its payload.

Chained, so that the state's digest, the last, speaks for everything sent in the session, in order. It
guards against accidents (a flipped bit, a wrong buffer, a mixed-up message), not against an adversary: the
nodes of a cluster trust each other, and a keyed hash would cost ten times as much per byte.
Source: https://github.com/Cyan4973/xxHash, XXH3 128 bits.
"""

import xxhash

from transfer.buffers import Buffer

DIGEST_BYTES = 16
FIRST = bytes(DIGEST_BYTES)
"""Stands for the predecessor of a session's first message."""


def message_digest(previous: bytes, envelope: bytes, payload: Buffer) -> bytes:
    """16 bytes. `previous`: the digest of the message before, `FIRST` for index 0; `envelope`: its fields."""
    state = xxhash.xxh3_128(previous)
    state.update(envelope)
    state.update(payload.data)
    return state.digest()
