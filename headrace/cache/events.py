"""Cache events: blocks and checkpoints that become findable or stop being so, as a node publishes them.

Order: a block's parent is stored before it and evicted after it; a checkpoint is stored after the block at whose end it
stands and evicted before it. Applying a cache's events to its earlier contents gives its present contents.
"""

from dataclasses import dataclass

from headrace.cache.types import PrefixKey


@dataclass(frozen=True, slots=True)
class BlockStored:
    """The block that ends the prefix `key` is findable; `parent` is the key of the prefix before it."""

    key: PrefixKey
    parent: PrefixKey | None


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    key: PrefixKey


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """The state after the `num_tokens` tokens that `key` names is findable."""

    key: PrefixKey
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CheckpointEvicted:
    """The checkpoint is gone: evicted, forgotten with the blocks below it, or superseded."""

    key: PrefixKey


CacheEvent = BlockStored | BlockEvicted | CheckpointStored | CheckpointEvicted


@dataclass(frozen=True, slots=True)
class CacheContents:
    """The keys of all findable blocks and checkpoints at one moment.

    Keys alone, in any order, because they are taken between two steps: a million blocks cost 40 ms this way and a
    second as events.
    """

    blocks: list[PrefixKey]
    checkpoints: list[PrefixKey]
