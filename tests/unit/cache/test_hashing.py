import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.hashing import HASHED_AT_ONCE, PrefixHasher, prefix_keys
from headrace.token_array import BadTokenIds, TokenArray

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_the_documented_bytes_are_hashed() -> None:
    root = blake3(b"headrace prefix 1" + b"\x02\0\0\0" + b"\x03\0\0\0" + b"abc").digest()
    first = blake3(root + b"\x01\0\0\0" + b"\xff\xff\xff\xff").digest()
    second = blake3(first + b"\x00\x01\0\0" + b"\x07\0\0\0").digest()
    assert prefix_keys([1, 2**32 - 1, 256, 7, 9], 2, b"abc") == [first, second]


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (32, 2), (33, 2)])
def test_only_full_blocks_have_a_key(num_tokens: int, num_keys: int) -> None:
    assert len(prefix_keys(range(num_tokens), 16)) == num_keys


def test_a_key_names_everything_before_it() -> None:
    first, second = prefix_keys([1, 2, 3, 4], 2), prefix_keys([9, 2, 3, 4], 2)
    assert first[0] != second[0] and first[1] != second[1]
    assert prefix_keys([1, 2, 3, 4, 5, 6], 2)[:2] == first


@given(tokens_lists, st.integers(1, 5), st.lists(st.integers(0, 9), max_size=30))
def test_keys_do_not_depend_on_how_the_tokens_arrive(tokens: list[int], size: int, cuts: list[int]) -> None:
    hasher = PrefixHasher(size, b"salt")
    start = 0
    for cut in cuts:
        hasher.extend(tokens[start : start + cut])
        start += cut
    hasher.extend(tokens[start:])
    assert hasher.keys == prefix_keys(tokens, size, b"salt")


def test_salts_and_block_sizes_share_no_key() -> None:
    tokens = [7] * 12
    variants = [(1, b""), (2, b""), (2, b"\0"), (2, b"\0\0"), (3, b""), (2, b"a"), (2, b"b"), (4, b"")]
    keys = [key for size, salt in variants for key in prefix_keys(tokens, size, salt)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("bad", [-1, 2**32, "x", 1.5, None])
def test_a_bad_token_is_refused_and_appends_nothing(bad: object) -> None:
    hasher = PrefixHasher(2)
    hasher.extend([1])
    with pytest.raises(BadTokenIds, match="unsigned 32-bit"):
        hasher.extend([2, 3, bad])  # type: ignore[list-item]
    hasher.extend([2])
    assert hasher.keys == prefix_keys([1, 2], 2)


@pytest.mark.parametrize("num_tokens", [0, 1, HASHED_AT_ONCE - 1, HASHED_AT_ONCE, HASHED_AT_ONCE + 1, 40_000])
def test_keys_of_packed_tokens_made_in_parts_are_those_of_a_list(num_tokens: int) -> None:
    ids = [7 * i % 2**32 for i in range(num_tokens)]
    hasher = PrefixHasher(16, b"salt")
    num_pauses = sum(1 for _ in hasher.extend_in_parts(TokenArray.of(ids)))
    assert hasher.keys == prefix_keys(ids, 16, b"salt")
    assert num_pauses == max(0, num_tokens - 1) // HASHED_AT_ONCE


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
        PrefixHasher(0)
