"""The digest of a message: XXH3-128 over its predecessor's digest, its envelope and its payload.

Chained from the plan's own digest, so that two sides whose plans differ in any number never agree, and the
state's digest, the last, speaks for everything sent in the session, in order. It guards against accidents (a
flipped bit, a wrong buffer, a mixed-up message), not against an adversary: the nodes of a cluster trust each
other, and a keyed hash would cost several times as much per byte.
Source: https://github.com/Cyan4973/xxHash, XXH3 128 bits.
"""

import struct
from dataclasses import astuple

import xxhash

from transfer.buffers import Buffer
from transfer.plan import TransferPlan

DIGEST_BYTES = 16


def plan_digest(plan: TransferPlan) -> bytes:
    """16 bytes: the predecessor of a session's first message."""
    return xxhash.xxh3_128_digest(struct.pack("<7Q", *astuple(plan)))


def message_digest(previous: bytes, envelope: bytes, payload: Buffer) -> bytes:
    """16 bytes. `previous`: the digest of the message before, or the plan's; `envelope`: its fields."""
    state = xxhash.xxh3_128(previous)
    state.update(envelope)
    state.update(payload.data)
    return state.digest()
