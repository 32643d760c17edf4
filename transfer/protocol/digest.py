"""Digest of a message: XXH3-128 over its predecessor's digest, its envelope's fields and its payload's page hashes.

    payload       page 0 | page 1 | ... | tail             whole pages of PAGE_BYTES, and the rest
    page hashes   XXH3-128 of each page, then the tail     16 bytes a page; the tail's bytes as they are
    digest        XXH3-128(previous digest | envelope's fields | page hashes)

Pages are hashed independently: a GPU hashes all at once (headrace/kernels/transfer/digest.py), a host one by one at
nearly the speed of a single hash, and both get the same bytes. The page hashes are in order and the envelope has the
payload's length, so swapped pages and a lost end show like flipped bits.

The chain begins with the plan's own digest, so two sides whose plans differ in any number never agree, and the last
digest covers everything sent in the session, in order. It guards against accidents (a flipped bit, a wrong buffer, a
mixed-up message), not against an adversary: the nodes of a cluster trust each other, and a keyed hash would cost
several times as much per byte.
Source: https://github.com/Cyan4973/xxHash, XXH3 128 bits.
"""

import struct
from dataclasses import fields
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from transfer.protocol.plan import TransferPlan

DIGEST_BYTES = 16

PAGE_BYTES = 8192
"""Short pages keep a GPU busy (8,192 of them in 64 MiB); long ones cost a host fewer calls, and make fewer hashes."""

PageHashes: TypeAlias = bytes | memoryview


def plan_digest(plan: TransferPlan) -> bytes:
    """16 bytes: the predecessor of a session's first message."""
    numbers = [getattr(plan, field.name) for field in fields(plan)]
    return xxhash.xxh3_128_digest(struct.pack(f"<{len(numbers)}Q", *numbers))


def message_digest(previous: bytes, envelope: bytes, hashes: PageHashes) -> bytes:
    """16 bytes.

    previous   digest of the message before, or of the plan
    envelope   the envelope's fields
    hashes     the payload's `page_hashes`
    """
    hashed = xxhash.xxh3_128(previous + envelope)
    hashed.update(hashes)  # 128 KiB for 64 MiB: not copied
    return hashed.digest()


def page_hashes(payload: NDArray[np.uint8]) -> bytes:
    """16 bytes for each whole page of a payload in host memory, then the bytes of its tail."""
    view, paged_bytes = payload.data, len(payload) // PAGE_BYTES * PAGE_BYTES
    pages = [xxhash.xxh3_128_digest(view[at : at + PAGE_BYTES]) for at in range(0, paged_bytes, PAGE_BYTES)]
    return b"".join((*pages, view[paged_bytes:]))
