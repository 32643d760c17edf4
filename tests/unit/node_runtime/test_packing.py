"""Messages between cache memory and staging, on a host and, where there is one, on a GPU beside a computing engine."""

import pytest
import torch

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.forward.memory import CacheMemory
from node_runtime.packing import BlockLocation, DevicePacking, HostPacking, staging_memory
from transfer.cuda import CudaMemory
from transfer.protocol.plan import PlannedMessage
from transfer.staging import Staging, StagingConfig

LAYOUT = CacheLayout(
    fingerprint="test", dtype="float32", state_dtype="float32", block_size=4,
    attention_groups=(AttentionGroup(2, 2, 16),), state_groups=(StateGroup(2, (5, 3), (4, 8, 8)),),
)  # fmt: skip
BLOCK_IDS = [6, 1, 4, 0]
BLOCKS = PlannedMessage(0, 1, 2, 2 * LAYOUT.block_bytes, 0, sendable_tokens=12)
STATE = PlannedMessage(1, 4, 0, 0, LAYOUT.state_bytes, sendable_tokens=16)
BOTH = PlannedMessage(0, 1, 2, 2 * LAYOUT.block_bytes, LAYOUT.state_bytes, sendable_tokens=12)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
LONG_CYCLES = 400_000_000  # about a fifth of a second
SOON_S = 1e12  # a deadline on the event loop's clock that never comes


async def call(work):
    return work()


class Side:
    def __init__(self, device):
        self.cache = CacheMemory(LAYOUT, num_blocks=8, num_slots=3, device=device)
        self.memory = staging_memory(device)
        self.staging = Staging(StagingConfig(2, BOTH.num_bytes), self.memory)
        on_host = not isinstance(self.memory, CudaMemory)
        self.packing = HostPacking(self.cache, call) if on_host else DevicePacking(self.cache, self.memory)
        for pool in self.cache.pools:
            pool.copy_(torch.randn(pool.shape))

    def place(self):
        return BlockLocation(BLOCK_IDS, 2)


@pytest.fixture(params=DEVICES)
async def side(request):
    return Side(request.param)


@pytest.mark.parametrize("messages", [(BLOCKS, STATE), (BOTH,)])
async def test_what_was_gathered_is_scattered_where_it_belongs_and_nowhere_else(side, messages):
    cache = side.cache
    (kv,), (states,) = cache.attention, cache.states
    blocks, state = kv[[1, 4]].clone(), (states.conv[2].clone(), states.rec[2].clone())
    others = kv[[0, 2, 3, 5, 6, 7]].clone(), states.rec[:2].clone()
    for message in messages:
        async with side.staging.hold(message.num_bytes, SOON_S) as buffer:
            await side.packing.gather(message, buffer, side.place)
            await side.memory.finished()
            if message.num_blocks:
                kv[[1, 4]] = 0
            if message.state_bytes:
                states.conv[2], states.rec[2] = 0, 0
            await side.packing.wait_event(cache.record_event())
            await side.packing.scatter(message, buffer, side.place)
            await side.memory.finished()
    assert torch.equal(kv[[1, 4]], blocks)
    assert torch.equal(states.conv[2], state[0]) and torch.equal(states.rec[2], state[1])
    assert torch.equal(kv[[0, 2, 3, 5, 6, 7]], others[0]) and torch.equal(states.rec[:2], others[1])


async def test_what_is_not_held_any_more_is_not_touched(side):
    def gone():
        raise RuntimeError("holds nothing")

    before = side.cache.attention[0].clone()
    async with side.staging.hold(BLOCKS.num_bytes, SOON_S) as buffer:
        for touch in (side.packing.gather, side.packing.scatter):
            with pytest.raises(RuntimeError, match="holds nothing"):
                await touch(BLOCKS, buffer, gone)
    assert torch.equal(side.cache.attention[0], before)


async def test_a_warm_up_leaves_the_cache_as_it_was(side):
    before = [pool.clone() for pool in side.cache.pools]
    await side.packing.warm_up(side.staging, SOON_S)
    for pool, was in zip(side.cache.pools, before, strict=True):
        assert torch.equal(pool, was)
    assert side.staging.num_free == 2


@on_gpu
async def test_a_chunk_is_gathered_when_it_is_computed_while_the_next_one_computes():
    side = Side("cuda")
    await side.packing.warm_up(side.staging, SOON_S)
    torch.cuda._sleep(LONG_CYCLES // 4)
    side.cache.attention[0][[1, 4]] = 7.0  # the chunk, behind others' work
    computed = side.cache.record_event()
    torch.cuda._sleep(4 * LONG_CYCLES)  # the next one
    next_one = side.cache.record_event()
    async with side.staging.hold(BLOCKS.num_bytes, SOON_S) as buffer:
        await side.packing.wait_event(computed)
        await side.packing.gather(BLOCKS, buffer, side.place)
        await side.memory.finished()
        assert not next_one.query()
        assert (buffer.payload.cpu().view(torch.float32) == 7.0).all()
