"""Ids in linked lists, beside Python's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.errors import CorruptCache
from headrace.cache.linked_ids import LinkedIds

NUM_IDS, NUM_LISTS = 6, 3


@given(st.lists(st.tuples(st.integers(0, NUM_IDS - 1), st.integers(0, NUM_LISTS - 1))))
def test_each_list_has_its_ids_in_the_order_in_which_they_came(moves: list[tuple[int, int]]) -> None:
    linked: LinkedIds[int] = LinkedIds(NUM_IDS, NUM_LISTS)
    expected: list[list[int]] = [[] for _ in range(NUM_LISTS)]
    for id_, to in moves:
        if any(id_ in ids for ids in expected):
            linked.remove(id_)
            next(ids for ids in expected if id_ in ids).remove(id_)
        else:
            linked.add(id_, to)
            expected[to].append(id_)
        assert [list(linked.in_order(number)) for number in range(NUM_LISTS)] == expected
        assert len(linked) == sum(map(len, expected))
        assert [each in linked for each in range(NUM_IDS)] == [
            any(each in ids for ids in expected) for each in range(NUM_IDS)
        ]


def test_an_id_is_in_one_list_at_most() -> None:
    linked: LinkedIds[int] = LinkedIds(NUM_IDS, NUM_LISTS)
    linked.add(2, to=1)
    with pytest.raises(CorruptCache, match="id 2 is in a list already"):
        linked.add(2, to=0)
    linked.remove(2)
    with pytest.raises(CorruptCache, match="id 2 is in no list"):
        linked.remove(2)
    assert not len(linked)
