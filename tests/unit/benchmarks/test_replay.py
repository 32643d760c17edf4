"""The trace replay: hit shares of a few requests, counted independently."""

import json
from pathlib import Path

import pytest

from benchmarks.cache.replay import BLOCK_TOKENS, Setting, Trace, hit_share, infinite_share, replay
from headrace.cache.checkpoints import checkpoint_policy
from headrace.cache.prefix_cache import PrefixCache
from headrace.config import ConfigError

B = BLOCK_TOKENS
# A prompt, its next turn, one that leaves the first after two blocks, and that one's next turn.
REQUESTS = [
    (4 * B + 10, [1, 2, 3, 4, 5]),
    (6 * B, [1, 2, 3, 4, 6, 7]),
    (4 * B + 1, [1, 2, 8, 9, 10]),
    (5 * B + 1, [1, 2, 8, 9, 11, 12]),
]
NUM_TOKENS = sum(num_tokens for num_tokens, _ in REQUESTS)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    path = tmp_path / "few.jsonl"
    lines = [{"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": ids} for n, ids in REQUESTS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Trace.read(path)


@pytest.mark.parametrize(
    ("policy", "grid", "resumed_blocks"),
    [
        ("none", B, 0),
        ("every", B, 4 + 2 + 4),
        ("branch", 100 * B, 4 + 0 + 4),  # the third leaves a checkpoint where it left, for a fourth
        ("branch", B, 4 + 2 + 4),
    ],
)
def test_resumed_tokens_by_policy(trace: Trace, policy: str, grid: int, resumed_blocks: int) -> None:
    cache = PrefixCache(num_blocks=100, num_slots=100, block_size=B)
    replayed = replay(trace, cache, checkpoint_policy(policy, grid), chunk_tokens=3 * B)
    assert replayed.resumed_share * NUM_TOKENS == pytest.approx(resumed_blocks * B)
    assert replayed.attention_share * NUM_TOKENS == pytest.approx((4 + 2 + 4) * B)
    assert replayed.stats.blocks.in_use == replayed.stats.slots.in_use == 0
    cache.check()


def test_an_infinite_cache_finds_all_that_came_before(trace: Trace) -> None:
    assert infinite_share(trace) * NUM_TOKENS == pytest.approx((4 + 2 + 4) * B)


def test_a_budget_of_gigabytes_becomes_blocks_and_slots(trace: Trace) -> None:
    ample = hit_share(trace, Setting("qwen35-4b", 10, "every", "lru"))
    assert ample == infinite_share(trace)
    bound = hit_share(trace, Setting("qwen35-4b", 10, "attention only", "lru"))
    assert bound == infinite_share(trace)
    packed = hit_share(trace, Setting("qwen35-4b", 10, "every int8", "lru"))
    assert packed == infinite_share(trace)
    with pytest.raises(ConfigError, match="raise cache_bytes"):
        hit_share(trace, Setting("qwen35-4b", 0.05, "branch", "lru", grid_tokens=512))
    with pytest.raises(ValueError, match="raise the budget"):
        replay(trace, PrefixCache(num_blocks=2, num_slots=3, block_size=B), checkpoint_policy("none"), 8192)
