"""The ways to an entry of the prefix index."""

import pytest

from headrace.cache.errors import CorruptCache
from headrace.cache.hashing import prefix_keys
from headrace.cache.index import PrefixIndex
from headrace.cache.types import BlockId


def test_a_block_has_an_entry_while_it_is_indexed() -> None:
    index, keys = PrefixIndex(num_blocks=4, block_size=4), prefix_keys(range(8), 4)
    last = index.add_chain(keys, None, [BlockId(3), BlockId(1)])
    assert last is not None and index.by_block(BlockId(1)) is last is index.get(keys[1])
    index.check()
    index.remove(last)
    index.check()
    assert index.by_block(BlockId(3)).key == keys[0]
    for block in (BlockId(1), BlockId(2)):
        with pytest.raises(CorruptCache, match=f"block {block} is not in the index"):
            index.by_block(block)


def test_a_block_that_outlives_its_key_is_found_by_the_check() -> None:
    index, keys = PrefixIndex(num_blocks=4, block_size=4), prefix_keys(range(8), 4)
    last = index.add_chain(keys, None, [BlockId(3), BlockId(1)])
    assert last is not None
    index.remove(last)
    index._by_block[BlockId(1)] = last
    with pytest.raises(CorruptCache, match="a block whose key is gone"):
        index.check()
