import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.hashing import PrefixHasher, prefix_keys
from headrace.cache.known_prompts import LEAST_TOKENS, KnownPrompts
from headrace.cache.types import PrefixKey
from headrace.token_array import TOKEN_BYTES, TokenArray

LONG = TokenArray.of(random.Random(1).choices(range(50_000), k=5 * LEAST_TOKENS + 7))


class CountedHasher(PrefixHasher):
    """Counts the tokens that it was given to hash."""

    num_hashed = 0

    def extend(self, tokens) -> None:
        self.num_hashed += len(tokens)
        super().extend(tokens)


def hashed(known: KnownPrompts, tokens: TokenArray, salt: bytes = b"", size: int = 16) -> tuple[list[PrefixKey], int]:
    """The keys, and how many tokens were hashed for them."""
    hasher = CountedHasher(size, salt)
    for _ in known.hash(hasher, tokens, salt):
        pass
    hasher.extend([3] * size)
    return hasher.keys, hasher.num_hashed - size


def keys_of(tokens: TokenArray, salt: bytes = b"", size: int = 16) -> list[PrefixKey]:
    return prefix_keys([*tokens, *[3] * size], size, salt)


def test_the_next_turn_is_hashed_from_the_end_of_the_last_one() -> None:
    known = KnownPrompts()
    assert hashed(known, LONG) == (keys_of(LONG), len(LONG))
    turn = LONG.followed_by(range(1000))
    assert hashed(known, turn) == (keys_of(turn), len(turn) - len(LONG) // 16 * 16)
    assert hashed(known, turn) == (keys_of(turn), len(turn) % 16)
    assert hashed(known, LONG) == (keys_of(LONG), len(LONG) % 16), "the shorter one is still known"


def test_a_prompt_that_parts_from_a_known_one_is_hashed_as_a_whole() -> None:
    known = KnownPrompts()
    hashed(known, LONG)
    for position in (0, 16, len(LONG) // 2, len(LONG) - 24):
        ids = list(LONG)
        ids[position] += 1
        other = TokenArray.of([*ids, *range(100)])
        assert hashed(known, other) == (keys_of(other), len(other))


def test_tenants_and_block_sizes_share_no_keys() -> None:
    known = KnownPrompts()
    for salt, size in ((b"a", 16), (b"b", 16), (b"a", 32), (b"", 1)):
        assert hashed(known, LONG, salt, size) == (keys_of(LONG, salt, size), len(LONG))


def test_the_oldest_prompts_are_forgotten_beyond_the_bound() -> None:
    prompts = [TokenArray.of([number, *LONG]) for number in range(4)]
    known = KnownPrompts(kept_bytes=3 * TOKEN_BYTES * len(prompts[0]))
    for prompt in prompts:
        hashed(known, prompt)
    assert hashed(known, prompts[1])[1] < 16
    assert hashed(known, prompts[0])[1] == len(prompts[0])


def test_no_more_prompts_are_known_than_can_be_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cache.known_prompts.MOST_PROMPTS", 3)
    prompts = [TokenArray.of([number, *LONG]) for number in range(4)]
    known = KnownPrompts()
    for prompt in prompts:
        hashed(known, prompt)
    assert hashed(known, prompts[1])[1] < 16
    assert hashed(known, prompts[0])[1] == len(prompts[0])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * LEAST_TOKENS), st.integers(0, 50)), max_size=12))
def test_keys_are_those_of_the_tokens_whatever_came_before(turns: list[tuple[int, int, int]]) -> None:
    known = KnownPrompts(kept_bytes=8 * TOKEN_BYTES * LEAST_TOKENS)
    for number, length, more in turns:
        prompt = TokenArray.of([number, *LONG][:length] + [number] * more)
        assert hashed(known, prompt)[0] == keys_of(prompt)


@pytest.mark.parametrize("num_tokens", [LEAST_TOKENS - 1, LEAST_TOKENS])
def test_short_prompts_are_not_kept(num_tokens: int) -> None:
    known, prompt = KnownPrompts(), LONG[:num_tokens]
    hashed(known, prompt)
    assert (hashed(known, prompt)[1] == num_tokens) == (num_tokens < LEAST_TOKENS)
