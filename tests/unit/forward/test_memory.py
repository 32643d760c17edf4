"""Cache memory as bytes: gather, scatter and conversion."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory

LAYOUT = CacheLayout(
    fingerprint="f",
    dtype="bfloat16",
    state_dtype="float32",
    block_size=4,
    attention_groups=(AttentionGroup(num_layers=2, num_heads=1, head_dim=8),),
    state_groups=(StateGroup(num_layers=3, conv_shape=(5, 3), rec_shape=(2, 4, 4)),),
)
SEVERAL = replace(
    LAYOUT,
    attention_groups=(
        AttentionGroup(num_layers=2, num_heads=2, head_dim=6),
        AttentionGroup(num_layers=1, num_heads=1, head_dim=20, num_planes=1),
        AttentionGroup(num_layers=3, num_heads=1, head_dim=8),
    ),
    state_groups=(
        StateGroup(num_layers=2, conv_shape=(7, 2)),
        StateGroup(num_layers=3, conv_shape=(5, 3), rec_shape=(2, 4, 4)),
        StateGroup(num_layers=1, rec_shape=(3, 2)),
    ),
)
LAYOUTS = pytest.mark.parametrize("layout", [LAYOUT, SEVERAL], ids=["one-of-each", "several"])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


def filled_memory(layout: CacheLayout = LAYOUT, device: str = "cpu") -> CacheMemory:
    memory = CacheMemory(layout, num_blocks=6, num_slots=5, device=device)
    for pool in memory.pools:
        pool.copy_(torch.randn(pool.shape))
    return memory


def clones(memory: CacheMemory) -> tuple[list[Tensor], list[Tensor]]:
    """The blocks of each attention group, and both parts of each state group."""
    blocks = [pool.clone() for pool in memory.attention]
    return blocks, [pool.clone() for pools in memory.states for pool in pools]


def all_equal(mine: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(*both) for both in zip(mine, others, strict=True))


@LAYOUTS
def test_blocks_and_states_travel_as_bytes_of_the_layout(layout: CacheLayout):
    source, target = filled_memory(layout), filled_memory(layout)
    blocks = torch.empty(3 * layout.block_bytes, dtype=torch.uint8)
    state = torch.empty(layout.state_bytes, dtype=torch.uint8)
    source.gather_prompt([4, 0, 5], layout.block_size, 0, 3, blocks)
    source.gather_state(3, state)
    kept_blocks, kept_states = clones(target)

    target.scatter_blocks([1, 3, 2], blocks)
    target.scatter_state(0, state)

    (sent_blocks, sent_states), (new_blocks, new_states) = clones(source), clones(target)
    assert all_equal([pool[[1, 3, 2]] for pool in new_blocks], [pool[[4, 0, 5]] for pool in sent_blocks])
    assert all_equal([pool[0] for pool in new_states], [pool[3] for pool in sent_states])
    assert all_equal([pool[[0, 4, 5]] for pool in new_blocks], [pool[[0, 4, 5]] for pool in kept_blocks])
    assert all_equal([pool[1:] for pool in new_states], [pool[1:] for pool in kept_states])
    assert torch.equal(state, torch.cat([pool[3].flatten().view(torch.uint8) for pool in sent_states]))
    first = torch.cat([pool[4].flatten() for pool in sent_blocks])
    assert torch.equal(blocks[: layout.block_bytes], first.view(torch.uint8)), "group by group"


@LAYOUTS
def test_layers_see_the_memory_of_their_group(layout: CacheLayout):
    memory = filled_memory(layout)
    planes = [
        pool[:, layer, plane]
        for group, pool in zip(layout.attention_groups, memory.attention, strict=True)
        for layer in range(group.num_layers)
        for plane in (0, group.num_planes - 1)  # a latent vector stands for key and value
    ]
    states = [part[:, layer] for pools in memory.states for layer in range(pools.conv.shape[1]) for part in pools]
    for seen, owned in ((memory.kv_pools, planes), (memory.state_pools, states)):
        flat = [pool for layer in seen for pool in layer]
        places = [(pool[0].data_ptr(), pool.stride(), pool.shape[1:]) for pool in owned]
        assert [(pool[0].data_ptr(), pool.stride(), pool.shape[1:]) for pool in flat] == places


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6, 8, 16])
@LAYOUTS
def test_a_prompt_travels_in_blocks_of_any_size(layout: CacheLayout, block_size: int, device: str):
    memory = filled_memory(layout, device)
    ids = [4, 0, 5]  # 12 tokens of the prompt
    # [layers, planes, tokens, heads, head_dim] of each group: the prompt as nobody stores it.
    groups = [torch.cat([pool[i] for i in ids], dim=2) for pool in memory.attention]
    wire = replace(layout, block_size=block_size)
    num_blocks = -(-12 // block_size)
    for first in range(num_blocks):
        out = torch.full(((num_blocks - first) * wire.block_bytes,), 0xA5, dtype=torch.uint8, device=device)
        memory.gather_prompt(ids, block_size, first, num_blocks - first, out)
        target = CacheMemory(wire, num_blocks + 1, 1, device)
        target.scatter_blocks(range(num_blocks - first), out)
        for pool, tokens in zip(target.attention, groups, strict=True):
            arrived = torch.cat([pool[i] for i in range(num_blocks - first)], dim=2)
            assert torch.equal(arrived[:, :, : 12 - first * block_size], tokens[:, :, first * block_size :])
            assert arrived[:, :, 12 - first * block_size :].isfinite().all(), "filled with tokens of the prompt"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@LAYOUTS
def test_states_travel_in_another_dtype_and_are_rounded_once(layout: CacheLayout, own: str, wire: str, device: str):
    # 45 values of two bytes: nothing is aligned.
    layout = replace(layout, state_dtype=own)
    source, target = (CacheMemory(layout, 1, 3, device) for _ in range(2))
    for pool in source.pools:
        pool.copy_(torch.randn(pool.shape))
    on_wire = layout.on_wire(wire)
    state = torch.empty(on_wire.state_bytes, dtype=torch.uint8, device=device)
    source.gather_state(2, state, wire)
    target.scatter_state(1, state, wire)
    is_exact = own == "bfloat16" or wire == "float32"  # float16 holds every bfloat16 of this size
    for sent, arrived in zip(source.states, target.states, strict=True):
        assert torch.equal(arrived.conv[1], sent.conv[2])
        rounded = sent.rec[2].to(getattr(torch, wire)).to(sent.rec.dtype)
        assert torch.equal(arrived.rec[1], rounded)
        assert torch.equal(rounded, sent.rec[2]) == (is_exact or not rounded.numel())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire, most_off", [("int8", 0.5 / 127), ("fp8", 2**-4)])
@LAYOUTS
def test_states_travel_with_a_byte_an_element_and_a_scale_a_row(
    layout: CacheLayout, own: str, wire: str, most_off: float, device: str
):
    layout = replace(layout, state_dtype=own)
    source, target = (CacheMemory(layout, 1, 3, device) for _ in range(2))
    for pool in source.pools:
        pool.copy_(torch.randn(pool.shape))
    on_wire = layout.on_wire(wire)
    state = torch.empty(on_wire.state_bytes, dtype=torch.uint8, device=device)
    source.gather_state(2, state, wire)
    target.scatter_state(1, state, wire)
    was_rounded = not any(sent.rec.numel() for sent in source.states)
    for sent, arrived, group in zip(source.states, target.states, layout.state_groups, strict=True):
        assert torch.equal(arrived.conv[1], sent.conv[2])
        if not sent.rec.numel():
            assert on_wire.rec_bytes(group) == 0
            continue
        values, back = sent.rec[2].float(), arrived.rec[1].float()
        largest = values.abs().amax(-1, keepdim=True)
        assert on_wire.rec_bytes(group) == values.numel() + 4 * largest.numel()
        assert ((back - values).abs() <= (most_off + 2**-8 * (own == "bfloat16")) * largest).all()
        was_rounded |= not torch.equal(back, values)  # a small group's values may all be among those that a byte holds
    assert was_rounded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", ["float16", "int8"])
@pytest.mark.parametrize("wire", ["float32", "float16", "int8"])
@LAYOUTS
def test_a_packed_checkpoint_travels_as_the_state_that_is_unpacked_from_it(
    layout: CacheLayout, kept: str, wire: str, device: str
):
    memory = CacheMemory(layout, 1, 2, device, checkpoint_dtype=kept, num_packed_slots=2)
    for pool in memory.pools:
        pool.copy_(torch.randn(pool.shape))
    memory.pack(0, 3)
    memory.unpack(3, 1)
    sent, unpacked = (torch.empty(layout.on_wire(wire).state_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    memory.gather_state(3, sent, wire)
    if kept == wire:
        memory.pack(0, 2)
        memory.gather_state(2, unpacked, wire)
    else:
        memory.gather_state(1, unpacked, wire)
    assert torch.equal(sent, unpacked)
    with pytest.raises(IndexError, match="slot 4"):
        memory.gather_state(4, sent, wire)
    with pytest.raises(IndexError, match="slot 3"):
        memory.scatter_state(3, sent, wire)


def test_a_state_that_is_a_window_alone_has_the_same_bytes_in_every_state_dtype():
    layout = replace(LAYOUT, state_groups=(StateGroup(2, (7, 2)),))
    assert {layout.on_wire(dtype).state_bytes for dtype in ("float32", "bfloat16", "int8")} == {2 * 7 * 2 * 2}
    assert layout.max_state_bytes == layout.state_bytes


def test_what_float16_cannot_hold_is_not_made_infinite():
    memory = CacheMemory(LAYOUT, 1, 2)
    conv, rec = memory.states[0]
    conv.zero_()
    rec[0] = 1e6
    rec[0, 0] = -1e6
    state = torch.empty(LAYOUT.on_wire("float16").state_bytes, dtype=torch.uint8)
    memory.gather_state(0, state, "float16")
    memory.scatter_state(1, state, "float16")
    assert (rec[1, 0] == -65504).all() and (rec[1, 1:] == 65504).all()


@LAYOUTS
def test_pools_weigh_what_the_layout_says(layout: CacheLayout):
    memory = filled_memory(layout)
    assert sum(pool.nbytes for pool in memory.attention) == 6 * layout.block_bytes
    assert sum(pool.nbytes for pools in memory.states for pool in pools) == 5 * layout.state_bytes


@pytest.mark.parametrize("block", [-1, 6])
def test_blocks_outside_the_pool_are_refused(block: int):
    memory = filled_memory()
    staging = torch.empty(LAYOUT.block_bytes, dtype=torch.uint8)
    with pytest.raises(IndexError, match=f"block {block}"):
        memory.gather_prompt([block], LAYOUT.block_size, 0, 1, staging)
    with pytest.raises(IndexError, match=f"block {block}"):
        memory.scatter_blocks([block], staging)
    with pytest.raises(IndexError, match="slot 5"):
        memory.gather_state(5, torch.empty(LAYOUT.state_bytes, dtype=torch.uint8))


def test_staging_of_another_size_is_refused():
    memory = filled_memory()
    with pytest.raises(ValueError, match="uint8"):
        memory.scatter_blocks([0, 1], torch.empty(LAYOUT.block_bytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        memory.scatter_state(0, torch.empty(LAYOUT.state_bytes - 4, dtype=torch.uint8))


def test_memory_of_another_model_is_refused(load_family):
    model = load_family("granite").model
    memory = CacheMemory(load_family("qwen35").model.cache_layout(16), 2, 2)
    with pytest.raises(ValueError, match="fingerprint"):
        ModelRunner(model, memory)
