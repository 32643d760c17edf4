import pytest

from headrace.cache.layout import CacheLayout
from headrace.wire.messages import Reservation
from node_runtime.config import NodeConfig
from node_runtime.sessions import plan_of

LAYOUT = CacheLayout("f", "float32", "float32", 16, 2, 2, 8, (3, 10, 3), (3, 2, 4, 4))


def reservation(num_tokens: int, hit: int) -> Reservation:
    return Reservation(7, hit, num_tokens, "host:1", LAYOUT, 5.0, bytes(32))


def test_a_plan_covers_the_blocks_beyond_the_attention_hit_and_the_state() -> None:
    messages = plan_of(reservation(100, 32), 3 * LAYOUT.block_bytes).messages
    assert [(m.first_block, m.num_blocks) for m in messages] == [(2, 3), (5, 2)], "the state fits behind the last"
    assert messages[-1].state_bytes == LAYOUT.state_bytes


def test_every_block_there_already_leaves_a_state_only_hand_over() -> None:
    plan = plan_of(reservation(64, 64), 3 * LAYOUT.block_bytes)
    assert [(m.num_blocks, m.state_bytes) for m in plan.messages] == [(0, LAYOUT.state_bytes)]


@pytest.mark.parametrize("change", [{"name": ""}, {"port": 70000}, {"staging_buffers": 0}, {"shutdown_grace_s": -1}])
def test_a_bad_setting_is_named(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        NodeConfig(**{"name": "p0", "model_path": "m"} | change)


def test_layouts_name_the_first_difference_with_both_values() -> None:
    other = CacheLayout("f", "float32", "float32", 32, 2, 2, 8, (3, 10, 3), (3, 2, 4, 4))
    assert LAYOUT.mismatch(LAYOUT) is None
    assert LAYOUT.mismatch(other) == "block_size 16 != 32"
