"""The table of all nodes' keys, while the keys of a node that is gone are swept out of it."""

import random

from headrace.cache.types import PREFIX_KEY_BYTES, PrefixKey
from router.cluster.key_holders import SWEPT_AT_ONCE, CacheTable


def random_keys(dice: random.Random, number: int) -> list[PrefixKey]:
    return [PrefixKey(dice.randbytes(PREFIX_KEY_BYTES)) for _ in range(number)]


def test_a_sweep_removes_one_node_alone_whatever_others_store_and_evict_meanwhile() -> None:
    dice, table = random.Random(0), CacheTable()
    gone, stays = table.new_bit(), table.new_bit()
    shared, own, others = (random_keys(dice, 3 * SWEPT_AT_ONCE) for _ in range(3))
    table.blocks.add([*shared, *own], gone)
    table.blocks.add([*shared, *others], stays)
    table.checkpoints.add(own[:10], gone)
    table.retire(gone)
    evicted, stored = [*shared[::2], *others[::2]], random_keys(dice, 6 * SWEPT_AT_ONCE)
    num_sweeps = 0
    while table.new_bit() != gone:  # it is given out again once no key has it
        table.blocks.discard(evicted[num_sweeps * 500 :][:500], stays)
        table.blocks.add(stored[num_sweeps * 1000 :][:1000], stays)
        table.sweep()
        num_sweeps += 1
        assert num_sweeps < 100
    assert num_sweeps > 5, "each sweeps a few"
    left = {*shared, *others, *stored[: num_sweeps * 1000]} - {*evicted[: num_sweeps * 500]}
    assert {key for key in (*shared, *own, *others, *stored) if table.blocks.holders(key)} == left
    assert all(table.blocks.holders(key) == stays for key in left)
    assert len(table.blocks) == len(left)
    assert not len(table.checkpoints)
