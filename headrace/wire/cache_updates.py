"""Updates about a node's cache for the router's index: dataclasses, and their conversion to protobuf and back.

Only keys travel, 32 bytes each, without framing: a key stands for a whole prefix, and whoever hashes a prompt knows the
prefix's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from headrace.cache.types import PREFIX_KEY_BYTES, PrefixKey
from headrace.wire.generated import headrace_pb2 as pb

CACHE_CHANGES = "cache_changes"
"""The counter in a node's status with the number of its cache's last change."""


class CacheChange(Enum):
    BLOCK_STORED = pb.CACHE_CHANGE_BLOCK_STORED
    BLOCK_EVICTED = pb.CACHE_CHANGE_BLOCK_EVICTED
    CHECKPOINT_STORED = pb.CACHE_CHANGE_CHECKPOINT_STORED
    CHECKPOINT_EVICTED = pb.CACHE_CHANGE_CHECKPOINT_EVICTED


@dataclass(frozen=True)
class CacheSnapshotPart:
    """Part of the cache's contents after change number `sequence`; `is_last` completes the snapshot."""

    incarnation: int
    sequence: int
    blocks: tuple[PrefixKey, ...]
    checkpoints: tuple[PrefixKey, ...]
    is_last: bool


@dataclass(frozen=True)
class CacheChanges:
    """Consecutive changes, numbered from `first_sequence` on."""

    incarnation: int
    first_sequence: int
    changes: tuple[tuple[CacheChange, PrefixKey], ...]


CacheUpdate = CacheSnapshotPart | CacheChanges


def encode_cache_update(update: CacheUpdate) -> pb.CacheUpdate:
    message = pb.CacheUpdate(incarnation=update.incarnation)
    match update:
        case CacheSnapshotPart():
            part = message.snapshot
            part.SetInParent()
            part.sequence, part.is_last = update.sequence, update.is_last
            part.blocks, part.checkpoints = b"".join(update.blocks), b"".join(update.checkpoints)
        case CacheChanges():
            message.changes.first_sequence = update.first_sequence
            message.changes.kinds.extend(kind.value for kind, _ in update.changes)
            message.changes.keys = b"".join(key for _, key in update.changes)
    return message


def decode_cache_update(message: pb.CacheUpdate) -> CacheUpdate:
    """Returns the update in a message. Raises ValueError for a message of another version."""
    match message.WhichOneof("update"):
        case "snapshot":
            part = message.snapshot
            return CacheSnapshotPart(
                incarnation=message.incarnation,
                sequence=part.sequence,
                blocks=tuple(_keys(part.blocks)),
                checkpoints=tuple(_keys(part.checkpoints)),
                is_last=part.is_last,
            )
        case "changes":
            kinds = map(CacheChange, message.changes.kinds)
            changes = tuple(zip(kinds, _keys(message.changes.keys), strict=True))
            return CacheChanges(message.incarnation, message.changes.first_sequence, changes)
        case _:
            raise ValueError("a CacheUpdate without a known update: the peer runs another version")


def _keys(data: bytes) -> Iterator[PrefixKey]:
    if len(data) % PREFIX_KEY_BYTES:
        raise ValueError(f"{len(data)} bytes of keys: not a multiple of {PREFIX_KEY_BYTES}")
    return (PrefixKey(data[start : start + PREFIX_KEY_BYTES]) for start in range(0, len(data), PREFIX_KEY_BYTES))
