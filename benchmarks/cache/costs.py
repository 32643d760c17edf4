"""The prefix cache's own work: hashing, matching, publishing, evicting. Pure Python, one thread.

    python -m benchmarks cache-costs [--sizes 10000 --sizes 1000000]

Each row fills a cache of so many blocks, one checkpoint for every 64 of them, and then keeps publishing into
it, so that every new block and every new checkpoint evicts an old one. Times are the best of several rounds.
"""

from __future__ import annotations

from benchmarks.timing import best_s
from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import PrefixHit, ResumeLocally
from headrace.cache.prefix_cache import PrefixCache
from headrace.cache.types import PrefixKey

BLOCK_SIZE = 16
PROMPT_TOKENS = 131_072
CHAIN_BLOCKS = 64  # of one prompt that fills the cache
ROUNDS = 7


def chain(number: int) -> list[PrefixKey]:
    """Keys of one prompt that shares nothing; as unique as hashes, and quicker made."""
    return [PrefixKey(b"%16d%16d" % (number, position)) for position in range(CHAIN_BLOCKS)]


def serve(cache: PrefixCache, keys: list[PrefixKey], *checkpoints: int) -> None:
    """A prompt that is computed, publishes its blocks and the given checkpoints (in blocks), and ends."""
    num_tokens = len(keys) * cache.block_size
    claim = cache.claim(keys, num_tokens=num_tokens, hit_policy=ResumeLocally(), max_reuse_tokens=0)
    assert claim is not None
    cache.state_written(claim)
    cache.publish_blocks(claim, keys, num_tokens)
    for position in checkpoints:
        slot = cache.reserve_slot(claim)
        assert slot is not None
        cache.publish_checkpoint(claim, keys[position - 1], position * cache.block_size, slot)
    cache.release(claim)


def serve_all(cache: PrefixCache, prompts: list[list[PrefixKey]]) -> None:
    for keys in prompts:
        serve(cache, keys, CHAIN_BLOCKS)


def row(num_blocks: int) -> str:
    """Fill, then measure in the steady state of eviction."""
    cache = PrefixCache(num_blocks=num_blocks, num_slots=num_blocks // CHAIN_BLOCKS + 2, block_size=BLOCK_SIZE)
    num_chains = num_blocks // CHAIN_BLOCKS
    for number in range(num_chains):
        serve(cache, chain(number), CHAIN_BLOCKS)
    batches = [[chain(num_chains + 100 * batch + i) for i in range(100)] for batch in range(ROUNDS)]
    evictions = cache.stats().totals.block_evictions
    publish_s = best_s(lambda: serve_all(cache, batches.pop()), ROUNDS)
    evicted = (cache.stats().totals.block_evictions - evictions) / ROUNDS / 100 / CHAIN_BLOCKS
    long = prefix_keys(range(PROMPT_TOKENS), BLOCK_SIZE)
    serve(cache, long, 1)  # the farthest checkpoint from the end that there can be
    hit = PrefixHit(PROMPT_TOKENS, BLOCK_SIZE, BLOCK_SIZE)
    assert cache.match(long, max_tokens=PROMPT_TOKENS) == hit
    match_s = best_s(lambda: cache.match(long, max_tokens=PROMPT_TOKENS), 50)
    cache.check()
    per_block_us = 1e6 * publish_s / 100 / CHAIN_BLOCKS
    return f"| {num_blocks:,} | {1e3 * match_s:.2f} | {per_block_us:.2f} | {evicted:.2f} |"


def main(sizes: list[int] = [10_000, 100_000, 1_000_000]) -> None:  # noqa: B006
    """The cache's own work; `sizes` in blocks."""
    tokens = list(range(PROMPT_TOKENS))
    seconds = best_s(lambda: prefix_keys(tokens, BLOCK_SIZE), ROUNDS)
    print(f"hashing: {PROMPT_TOKENS / seconds / 1e6:.1f} M tokens/s, {1e3 * seconds:.1f} ms for {PROMPT_TOKENS:,}\n")
    print(f"| blocks cached | match {PROMPT_TOKENS:,} tokens, ms | publish + evict a block, us | evicted a block |")
    print("|---:|---:|---:|---:|")
    for size in sizes:
        print(row(size), flush=True)
