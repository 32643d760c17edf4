"""Reuse distances: what caches of any size keep, beside caches of that size that are replayed."""

import math
import random
import statistics
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import pytest

from headrace.cache.types import PrefixKey
from router.routing import reuse
from router.routing.reuse import CacheSize, MissRatioCurve, Reuse, Reuses

BLOCK_SIZE = reuse.EVERY_TOKENS  # each of these blocks is looked at
SAMPLE_TOKENS = BLOCK_SIZE * (reuse.LOW_BITS + 1)
ANY = 1 << 40


def size(tokens: int, states: int, requests: int = ANY) -> CacheSize:
    return CacheSize(tokens, states, requests)


def sampled(chat: int, num_samples: int) -> list[PrefixKey]:
    """Keys of a prefix whose blocks are followed, all of them."""
    return [PrefixKey(bytes([0xFF]) + f"{chat} {place}".encode()) for place in range(num_samples)]


def seen(reuses: Reuses, requests: Sequence[tuple[int, Sequence[PrefixKey]]]) -> Reuses:
    """These requests, one after the other."""
    for number, keys in requests:
        reuses.began(number, keys, BLOCK_SIZE)
        reuses.ended(number)
    return reuses


def chats(rng: random.Random, num_chats: int, num_requests: int) -> Iterator[tuple[int, Sequence[PrefixKey]]]:
    """Turns of chats at random, each of which goes on for eight turns and is followed by another."""
    turns = {chat: 0 for chat in range(num_chats)}
    for number in range(num_requests):
        chat = rng.choice(list(turns))
        yield number, sampled(chat, 16 + 2 * turns[chat])
        turns[chat] += 1
        if turns[chat] == 8:
            del turns[chat]
            turns[num_chats + number] = 0


def computed_by_a_cache(requests: Sequence[tuple[int, Sequence[PrefixKey]]], num_samples: int) -> float:
    """The share of the last requests that a node computes whose cache has so many samples and evicts by recency."""
    cached: OrderedDict[PrefixKey, None] = OrderedDict()
    computed = total = 0
    for place, (_, keys) in enumerate(requests):
        if place >= len(requests) - reuse.RECENT_REQUESTS:
            computed += sum(key not in cached for key in keys)
            total += len(keys)
        for key in keys:
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > num_samples:
            cached.popitem(last=False)
    return computed / total


def test_nothing_is_known_at_first() -> None:
    assert Reuses().curve.miss_ratio(0, 0) == 0
    assert not Reuses().curve.is_short(size(0, 0), size(ANY, ANY))


@pytest.mark.parametrize("num_chats", [8, 24])
def test_shares_are_those_of_caches_that_evict_by_recency(num_chats: int) -> None:
    requests = list(chats(random.Random(num_chats), num_chats, 1024))
    curve = seen(Reuses(), requests).curve
    for num_samples in (1, 100, 200, 400, 600, 1200):
        found = computed_by_a_cache(requests, num_samples)
        assert curve.miss_ratio(num_samples * SAMPLE_TOKENS, ANY) == pytest.approx(found, abs=0.06)


@pytest.mark.parametrize("num_samples", [1, 4, 8])
def test_distances_are_right_on_average(num_samples: int) -> None:
    """Of prompts that come at random, several of which are one generation."""
    rng = random.Random(num_samples)
    order = [rng.randrange(100) for _ in range(1024)]
    distances = seen(Reuses(), [(each, sampled(each, num_samples)) for each in order]).curve.reuses
    recent, others = list(dict.fromkeys(reversed(order[:-256]))), []  # the latest first
    for each in order[-256:]:
        others.append(recent.index(each))
        recent.remove(each)
        recent.insert(0, each)
    exact = statistics.mean(others) * num_samples * SAMPLE_TOKENS
    assert statistics.mean(each.tokens for each in distances) == pytest.approx(exact, rel=0.01)


def test_real_keys_are_sampled_to_the_tokens_that_they_stand_for() -> None:
    """Blocks of any size: a prompt that comes back is found where others have used fewer tokens than the cache has."""
    rng = random.Random(0)
    for block_size in (16, 32, 64, 128):
        reuses = Reuses()
        prompts = [[PrefixKey(rng.randbytes(32)) for _ in range(65536 // block_size)] for _ in range(20)]
        for number in range(200):
            reuses.began(number, prompts[number % 20], block_size)
            reuses.ended(number)
        assert reuses.curve.miss_ratio(24 * 65536, ANY) < 0.2  # the first uses
        assert reuses.curve.miss_ratio(16 * 65536, ANY) == 1


def test_what_requests_under_way_use_takes_room_until_they_end() -> None:
    """Twenty chats with no pause between their turns: one returns as soon as it ends, and all others are in use."""
    reuses = Reuses()
    prompts = [sampled(chat, 20) for chat in range(20)]
    for chat, keys in enumerate(prompts):
        reuses.began(chat, keys, BLOCK_SIZE)
    for number in range(20, 520):
        reuses.ended(number - 20)
        reuses.began(number, prompts[number % 20], BLOCK_SIZE)
    assert reuses.curve.miss_ratio(410 * SAMPLE_TOKENS, ANY) == 0
    assert reuses.curve.miss_ratio(370 * SAMPLE_TOKENS, ANY) == 1
    assert reuses.curve.miss_ratio(ANY, 26) == 0
    assert reuses.curve.miss_ratio(ANY, 18) == 1


def test_states_are_kept_for_so_many_requests_however_short_these_are() -> None:
    requests = [(number, sampled(number % 30, 1)) for number in range(600)]
    curve = seen(Reuses(), requests).curve
    assert curve.miss_ratio(ANY, 40) == 0
    assert curve.miss_ratio(ANY, 20) == 1


def test_a_prefix_that_others_use_is_found_wherever_it_was_used_last() -> None:
    system, reuses = sampled(-1, 8), Reuses()
    for number in range(64):
        reuses.began(number, [*system, *sampled(number, 8)], BLOCK_SIZE)
    assert reuses.curve.miss_ratio(ANY, ANY) == pytest.approx(0.5, abs=0.01)
    for number in range(64):
        reuses.ended(number)
    seen(reuses, [(number, [*system, *sampled(number % 64, 8)]) for number in range(64, 320)])
    assert reuses.curve.miss_ratio(ANY, ANY) == 0


def test_what_a_request_under_way_uses_is_found_in_any_cache_until_its_last_user_ends() -> None:
    """Else a system prompt would count as lost where as many requests are under way as there are slots."""
    system, reuses = sampled(-1, 8), Reuses()
    for number in range(96):
        reuses.began(number, [*system, *sampled(number, 8)], BLOCK_SIZE)
    for number in range(96, 352):
        reuses.ended(number - 96)
        reuses.began(number, [*system, *sampled(number, 8)], BLOCK_SIZE)
    assert reuses.curve.miss_ratio(1, 1) == 0.5
    for number in range(256, 352):
        reuses.ended(number)
    seen(reuses, [(number, sampled(number, 8)) for number in range(352, 432)])
    for number in range(432, 688):
        reuses.began(number, system, BLOCK_SIZE)
    assert reuses.curve.miss_ratio(1, 1) == 1 / 256, "the first of these uses"
    assert reuses.curve.miss_ratio(ANY, ANY) == 0


def comes_back(keys: Sequence[PrefixKey], others: Sequence[Sequence[PrefixKey]]) -> bool:
    """True if a prompt is known when it comes again after these others, a multiple of `REQUESTS_A_CURVE`."""
    reuses = seen(Reuses(), list(enumerate([keys, *others])))
    again = reuse.REQUESTS_A_CURVE
    for number in range(1 - again, 0):
        reuses.began(number, keys, BLOCK_SIZE)
    return not math.isinf(reuses.curve.reuses[1 - again].tokens)


@pytest.mark.parametrize(("num_samples", "kept", "lost"), [(1, 8000, 8400), (32, 1000, 1048), (1024, 56, 72)])
def test_what_was_last_used_too_long_ago_counts_as_new(
    num_samples: int, kept: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight short prompts are a generation, and long ones alone are many times one."""
    monkeypatch.setattr(reuse, "MOST_SAMPLES", 64 * 1024)
    monkeypatch.setattr(reuse, "MOST_GENERATIONS", 1024)
    first, *others = (sampled(number, num_samples) for number in range(1 + lost))
    assert comes_back(first, others[:kept])
    assert not comes_back(first, others)


def test_an_idle_prompt_is_forgotten_behind_busy_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MOST_GENERATIONS", 64)
    idle, busy = sampled(0, 40), sampled(1, 1)
    assert comes_back(idle, [busy] * 8 * 60)
    assert not comes_back(idle, [busy] * 8 * 70)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MOST_SAMPLES", 2048)
    reuses, used = Reuses(), []
    tracemalloc.start()
    for first in range(0, 2400, 600):
        seen(reuses, [(number, sampled(number, 20)) for number in range(first, first + 600)])
        used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(used) < 1.2 * used[0]


def test_requests_that_did_not_begin_are_between_no_two_uses() -> None:
    """Prompts of one token end, too; no cache for answers has to hold them."""
    curves = []
    for num_others in (0, 400):
        reuses = seen(Reuses(), [(number, sampled(number % 10, 40)) for number in range(400)])
        for number in range(1000, 1000 + num_others):
            reuses.ended(number)
        curves.append(seen(reuses, [(number, sampled(number % 10, 40)) for number in range(400, 408)]).curve)
    assert curves[0] == curves[1]


def test_a_part_is_short_only_where_the_whole_would_keep_more() -> None:
    requests = [(number, sampled(number % 10, 40)) for number in range(400)]  # 360 samples between two uses
    curve = seen(Reuses(), requests).curve
    small, large = (size(num_samples * SAMPLE_TOKENS, ANY) for num_samples in (200, 500))
    assert curve.is_short(small, large)
    assert not curve.is_short(small, small)
    assert not curve.is_short(large, large)
    few, many = size(ANY, 12), size(ANY, 100)
    assert curve.is_short(few, many)
    assert not curve.is_short(few, size(ANY, 6))


@pytest.mark.parametrize(("lost", "is_short"), [(9, False), (11, True)])
def test_a_part_is_short_from_a_tenth_more_misses_on(lost: int, is_short: bool) -> None:
    part, whole = size(1000, ANY), size(2000, ANY)
    curve = MissRatioCurve([Reuse(100, math.inf, math.inf), Reuse(lost, 1500, 0), Reuse(900, 500, 0)])
    assert curve.is_short(part, whole) == is_short


@pytest.mark.parametrize(("of_part", "of_whole", "is_short"), [(159, 116, True), (161, 116, False), (159, 114, False)])
def test_a_request_takes_more_than_one_slot(of_part: int, of_whole: int, is_short: bool) -> None:
    """A state is kept for 100 requests by 160 slots where prompts are handed over, by 115 where they are not."""
    curve = MissRatioCurve([Reuse(1, 0, 100)])
    assert curve.is_short(size(ANY, of_part), size(ANY, of_whole)) == is_short


def test_a_part_is_short_that_holds_too_few_of_the_requests_under_way() -> None:
    """No cache finds anything here, so that misses tell nothing. The prompts share twenty samples."""
    reuses, shared = Reuses(), sampled(0, 20)
    for number in range(24):
        reuses.began(number, [*shared, *sampled(1 + number, 20)], BLOCK_SIZE)
    held, whole = 500 * SAMPLE_TOKENS * 2 // 3, size(ANY, ANY)
    for tokens, requests, is_short in ((held + 1, 16, False), (held - 1, 16, True), (held + 1, 15, True)):
        assert reuses.curve.is_short(size(tokens, ANY, requests), whole) == is_short
    for number in range(24):
        reuses.ended(number)
    assert not reuses.curve.is_short(size(held - 1, ANY, 15), whole), "they have ended, and no others have come"
