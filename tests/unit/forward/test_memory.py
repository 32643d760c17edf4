"""Cache memory as bytes: gather, scatter and conversion."""

from dataclasses import replace

import pytest
import torch

from headrace.cache.layout import CacheLayout
from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory

LAYOUT = CacheLayout(
    fingerprint="f",
    dtype="bfloat16",
    state_dtype="float32",
    block_size=4,
    num_attention_layers=2,
    num_kv_heads=1,
    head_dim=8,
    conv_shape=(3, 5, 3),
    rec_shape=(3, 2, 4, 4),
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


def filled_memory(device: str = "cpu") -> CacheMemory:
    memory = CacheMemory(LAYOUT, num_blocks=6, num_slots=5, device=device)
    for pool in (memory.kv, memory.conv, memory.rec):
        pool.copy_(torch.randn(pool.shape))
    return memory


def test_blocks_and_states_travel_as_bytes_of_the_layout():
    source, target = filled_memory(), filled_memory()
    blocks = torch.empty(3 * LAYOUT.block_bytes, dtype=torch.uint8)
    state = torch.empty(LAYOUT.state_bytes, dtype=torch.uint8)
    source.gather_prompt([4, 0, 5], LAYOUT.block_size, 0, 3, blocks)
    source.gather_state(3, state)
    kept_kv, kept_rec = target.kv.clone(), target.rec.clone()

    target.scatter_blocks([1, 3, 2], blocks)
    target.scatter_state(0, state)

    assert torch.equal(target.kv[[1, 3, 2]], source.kv[[4, 0, 5]])
    assert torch.equal(target.conv[0], source.conv[3]) and torch.equal(target.rec[0], source.rec[3])
    assert torch.equal(target.kv[[0, 4, 5]], kept_kv[[0, 4, 5]])
    assert torch.equal(target.rec[1:], kept_rec[1:])
    assert torch.equal(state[: LAYOUT.conv_bytes], source.conv[3].flatten().view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6, 8, 16])
def test_a_prompt_travels_in_blocks_of_any_size(block_size: int, device: str):
    memory = filled_memory(device)
    ids = [4, 0, 5]  # 12 tokens of the prompt
    # [layers, 2, tokens, heads, head_dim]: the prompt as nobody stores it.
    tokens = torch.cat([memory.kv[i] for i in ids], dim=2)
    wire = replace(LAYOUT, block_size=block_size)
    num_blocks = -(-12 // block_size)
    for first in range(num_blocks):
        out = torch.full(((num_blocks - first) * wire.block_bytes,), 0xA5, dtype=torch.uint8, device=device)
        memory.gather_prompt(ids, block_size, first, num_blocks - first, out)
        target = CacheMemory(wire, num_blocks + 1, 1, device)
        target.scatter_blocks(range(num_blocks - first), out)
        arrived = torch.cat([target.kv[i] for i in range(num_blocks - first)], dim=2)
        assert torch.equal(arrived[:, :, : 12 - first * block_size], tokens[:, :, first * block_size :])
        assert arrived[:, :, 12 - first * block_size :].isfinite().all(), "filled with tokens of the prompt"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_states_travel_in_another_dtype_and_are_rounded_once(own: str, wire: str, device: str):
    layout = replace(LAYOUT, state_dtype=own, conv_shape=(3, 5, 3))  # 45 values of two bytes: nothing is aligned
    source, target = (CacheMemory(layout, 1, 3, device) for _ in range(2))
    for pool in (source.conv, source.rec):
        pool.copy_(torch.randn(pool.shape))
    on_wire = layout.on_wire(wire)
    state = torch.empty(on_wire.state_bytes, dtype=torch.uint8, device=device)
    source.gather_state(2, state, wire)
    target.scatter_state(1, state, wire)
    assert torch.equal(target.conv[1], source.conv[2])
    rounded = source.rec[2].to(getattr(torch, wire)).to(source.rec.dtype)
    assert torch.equal(target.rec[1], rounded)
    is_exact = own == "bfloat16" or wire == "float32"  # float16 holds every bfloat16 of this size
    assert torch.equal(rounded, source.rec[2]) == is_exact


def test_what_float16_cannot_hold_is_not_made_infinite():
    memory = CacheMemory(LAYOUT, 1, 2)
    memory.conv.zero_()
    memory.rec[0] = 1e6
    memory.rec[0, 0] = -1e6
    state = torch.empty(LAYOUT.on_wire("float16").state_bytes, dtype=torch.uint8)
    memory.gather_state(0, state, "float16")
    memory.scatter_state(1, state, "float16")
    assert (memory.rec[1, 0] == -65504).all() and (memory.rec[1, 1:] == 65504).all()


def test_pools_weigh_what_the_layout_says():
    memory = filled_memory()
    assert memory.kv.nbytes == 6 * LAYOUT.block_bytes
    assert memory.conv.nbytes + memory.rec.nbytes == 5 * LAYOUT.state_bytes


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
