"""Ids of the cache. They are plain integers and bytes at run time, distinct types to the checker."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in the attention pool: attention KV of `block_size` tokens."""

SlotId = NewType("SlotId", int)
"""Index of a slot in the state pool: one running state or one checkpoint."""

PrefixKey = NewType("PrefixKey", bytes)
"""Chained 32-byte hash of a whole prefix that ends on a block boundary; see `headrace.cache.hashing`."""

PREFIX_KEY_BYTES = 32

Tier = NewType("Tier", int)
"""Eviction tier of a checkpoint: lower tiers are evicted first. See `PRIMARY`."""

PRIMARY = Tier(6)
"""The tier of checkpoints that a request is likely to resume from. Those below it are grid checkpoints: kept while
slots are free, never at the expense of a higher tier, and made primary once a request has resumed from them."""
