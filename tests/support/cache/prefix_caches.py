"""A small prefix cache, and requests that claim from it and leave their blocks and checkpoints there."""

from headrace.cache.claims import Claim
from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import HitPolicy, ResumeLocally
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.types import PrefixKey

SIZE = 4
KEYS = prefix_keys(range(40), SIZE)


def new_cache(num_blocks: int = 8, num_slots: int = 4) -> PrefixCache:
    return PrefixCache(num_blocks=num_blocks, num_slots=num_slots, block_size=SIZE)


def claimed(
    cache: PrefixCache, num_tokens: int, keys: list[PrefixKey] = KEYS, policy: HitPolicy | None = None
) -> Claim:
    policy = policy or ResumeLocally()
    claim = cache.claim(keys, num_tokens=num_tokens, hit_policy=policy, max_reuse_tokens=policy.reuse_limit(num_tokens))
    cache.check()
    assert claim is not None
    return claim


def published(cache: PrefixCache, num_tokens: int, *checkpoints: int, keys: list[PrefixKey] = KEYS) -> None:
    """A finished request that left its blocks, and checkpoints at the given positions."""
    claim = claimed(cache, num_tokens, keys)
    cache.publish_blocks(claim, keys, num_tokens)
    for position in checkpoints:
        slot = cache.reserve_slot(claim)
        assert slot is not None
        cache.publish_checkpoint(claim, keys[position // SIZE - 1], position, slot)
    cache.release(claim)
    cache.check()
