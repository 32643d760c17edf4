"""Garbage collections of a server that caches blocks."""

import gc
import sys
from collections.abc import Iterator
from itertools import count

import pytest

from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import ResumeLocally
from headrace.cache.prefix_cache import PrefixCache
from headrace.pauses import COLLECT_EVERY, keep_pauses_short


@pytest.fixture
def short_pauses() -> Iterator[None]:
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    keep_pauses_short()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(switch_s)


def test_collections_between_full_ones_visit_few_objects_however_many_are_cached(short_pauses: None) -> None:
    visited: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 1:
            visited.append(sum(len(gc.get_objects(generation)) for generation in (0, 1)))

    cache, numbers = PrefixCache(num_blocks=60_000, num_slots=2, block_size=1), count()
    gc.callbacks.append(note)
    try:
        for _ in range(50):
            keys = prefix_keys([next(numbers) for _ in range(1000)], 1)
            claim = cache.claim(keys, num_tokens=1000, hit_policy=ResumeLocally(), max_reuse_tokens=999)
            assert claim is not None
            cache.publish_blocks(claim, keys, 1000)
            cache.release(claim)
    finally:
        gc.callbacks.remove(note)
    assert len(visited) > 3
    assert max(visited) < 2 * COLLECT_EVERY[0] * 10, "a few milliseconds of a step, at most"
