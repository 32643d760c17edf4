"""A table of keys in parts, beside one dict."""

import random

import pytest

from headrace.cache.key_table import NUM_PARTS, KeyTable
from headrace.cache.types import PREFIX_KEY_BYTES, PrefixKey


def test_it_holds_what_one_dict_would() -> None:
    dice, expected = random.Random(0), dict[PrefixKey, int]()
    table: KeyTable[int] = KeyTable()
    for number in range(5_000):
        key = PrefixKey(dice.randbytes(PREFIX_KEY_BYTES))
        table[key] = expected[key] = number
        if number % 3 == 0:
            del table[key], expected[key]
            assert key not in table and table.get(key) is None
    assert len(table) == len(expected)
    assert all(key in table and table[key] == table.get(key) == value for key, value in expected.items())
    assert sorted(table.keys()) == sorted(expected)
    assert sorted(table.values()) == sorted(expected.values())


def test_no_part_has_much_more_than_its_share_of_keys() -> None:
    dice, num_keys = random.Random(0), 100 * NUM_PARTS
    table: KeyTable[int] = KeyTable()
    for number in range(num_keys):
        table[PrefixKey(dice.randbytes(PREFIX_KEY_BYTES))] = number
    assert max(map(len, table.parts)) < 2 * num_keys / NUM_PARTS


def test_a_key_that_is_not_there_raises_as_in_a_dict() -> None:
    table: KeyTable[int] = KeyTable()
    for work in (lambda key: table[key], table.__delitem__):
        with pytest.raises(KeyError):
            work(PrefixKey(bytes(PREFIX_KEY_BYTES)))
