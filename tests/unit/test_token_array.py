"""Token ids as one value."""

import gc
import pickle
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.token_array import BadTokenIds, TokenArray

ids_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
bounds = st.none() | st.integers(-50, 50)


@given(ids_lists, bounds, bounds, st.none() | st.integers(1, 3))
def test_it_reads_as_the_tuple_of_its_ids(
    ids: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    tokens = TokenArray.of(ids)
    assert (len(tokens), bool(tokens), tuple(tokens)) == (len(ids), bool(ids), tuple(ids))
    assert [tokens[i] for i in range(-len(ids), len(ids))] == [*ids, *ids]
    part = tokens[start:stop:step]
    assert isinstance(part, TokenArray) and [*part] == ids[start:stop:step]
    assert tokens.largest == max(ids, default=0)
    assert list(reversed(tokens)) == ids[::-1]
    with pytest.raises(IndexError):
        tokens[len(ids)]


@given(ids_lists, ids_lists)
def test_equal_ids_are_equal_values(ids: list[int], others: list[int]) -> None:
    tokens, other = TokenArray.of(ids), TokenArray.of(others)
    assert (tokens == other) == (ids == others)
    assert len({tokens, TokenArray.of(ids)}) == 1
    assert tokens.followed_by(others) == TokenArray.of([*ids, *others])
    assert tokens.followed_by(other) == tokens.followed_by(others)


def test_the_documented_bytes_are_little_endian() -> None:
    assert TokenArray.of([1, 258, 2**32 - 1]).packed == b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\xff"
    assert [*TokenArray(b"\x01\0\0\0\x02\x01\0\0")] == [1, 258]


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5, 4095])
def test_bytes_that_are_no_whole_ids_are_refused(num_bytes: int) -> None:
    with pytest.raises(BadTokenIds, match=f"{num_bytes} bytes are no token ids: each has 4 bytes"):
        TokenArray(bytes(num_bytes))


@pytest.mark.parametrize("ids", [[-1], [3, 2**32], ["x"], [1.5], [None]])
def test_what_is_no_unsigned_32_bit_integer_is_refused(ids: Iterable[int]) -> None:
    for make in (TokenArray.of, TokenArray.of([7]).followed_by):
        with pytest.raises(BadTokenIds, match="unsigned 32-bit integers"):
            make(ids)


def test_it_cannot_be_changed_and_a_growing_copy_leaves_it_alone() -> None:
    tokens = TokenArray.of([1, 2])
    with pytest.raises(AttributeError):
        tokens.packed = b""  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        tokens.ids[0] = 5
    copy = tokens.growing()
    copy.append(3)
    assert [*copy] == [1, 2, 3] and tokens == TokenArray.of([1, 2])


def test_a_pickle_of_it_is_its_bytes() -> None:
    tokens = TokenArray.of(range(100_000, 110_000))
    pickled = pickle.dumps(tokens, pickle.HIGHEST_PROTOCOL)
    assert pickle.loads(pickled) == tokens
    assert len(pickled) < len(tokens.packed) + 200


def test_garbage_collections_visit_one_object_for_any_number_of_ids() -> None:
    tokens = TokenArray.of(range(10_000))
    assert not gc.is_tracked(tokens.packed)
    for holder in (tokens, tokens.growing()):
        assert len(gc.get_referents(holder)) <= 2  # its bytes and its class


def test_a_repr_is_short() -> None:
    assert repr(TokenArray.of([5, 6])) == "TokenArray(2 ids: 5, 6)"
    assert repr(TokenArray.of(range(10_000))) == "TokenArray(10000 ids: 0, 1, 2, 3, 4, 5, 6, 7, ...)"
