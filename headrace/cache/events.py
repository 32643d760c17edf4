"""What becomes findable in a cache and what stops being so, as values: the stream that a node publishes.

In order: a block's parent is stored before it and evicted after it; a checkpoint is stored after the block
that ends where it stands and evicted before it. Applying the events of a cache to what it held before gives
what it holds now.
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
    """Gone for whatever reason: evicted, forgotten with the blocks below it, or superseded."""

    key: PrefixKey


CacheEvent = BlockStored | BlockEvicted | CheckpointStored | CheckpointEvicted


@dataclass(frozen=True, slots=True)
class CacheContents:
    """The keys of what is findable at one moment.

    Keys alone, because they are taken between two steps: a million blocks cost 30 ms this way and a second as
    events. A prefix comes before those that go on from it.
    """

    blocks: list[PrefixKey]
    checkpoints: list[PrefixKey]
