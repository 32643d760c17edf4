"""Staging on a GPU: its order beside the engine's stream, and waiting that holds up nobody. Runs where there is one."""

import asyncio
import time

import pytest
import torch

from transfer.cuda import CudaMemory
from transfer.protocol.digest import PAGE_BYTES, page_hashes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

DEVICE = torch.device("cuda", 0)
LONG_CYCLES = 400_000_000  # about a fifth of a second


@pytest.fixture(params=[0.0003, 0.0], ids=["asked for", "slept for"])
async def memory(request):
    return CudaMemory(DEVICE, spin_s=request.param)


def random_bytes(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))


def recorded(device: torch.device) -> torch.cuda.Event:
    """At the end of the engine's stream."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


@pytest.mark.parametrize("length", [1, 300, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES + 77, 64 << 20])
async def test_a_payload_has_the_page_hashes_that_a_host_finds(memory: CudaMemory, length: int):
    payload = random_bytes(length)
    [buffer] = memory.allocate(1, length)
    buffer.whole.copy_(payload)
    torch.cuda.synchronize()
    assert await memory.page_hashes(buffer) == page_hashes(payload.numpy())


async def test_buffers_do_not_overlap_and_begin_where_wide_loads_may(memory: CudaMemory):
    buffers = memory.allocate(3, 2 * PAGE_BYTES + 40)
    for i, buffer in enumerate(buffers):
        assert len(buffer.whole) == 2 * PAGE_BYTES + 40 and buffer.whole.data_ptr() % 16 == 0
        buffer.whole.fill_(i + 1)
    assert [set(buffer.whole.tolist()) for buffer in buffers] == [{1}, {2}, {3}]


async def test_page_hashes_come_behind_what_was_enqueued_before(memory: CudaMemory):
    source = random_bytes(1 << 20).to(DEVICE)
    [buffer] = memory.allocate(1, len(source))
    await memory.page_hashes(buffer)  # the kernel is known, and launched without Triton from here on
    with memory.stream():
        torch.cuda._sleep(LONG_CYCLES // 10)
        buffer.whole.copy_(source, non_blocking=True)
    assert await memory.page_hashes(buffer) == page_hashes(source.cpu().numpy())


async def test_staging_does_not_wait_for_what_the_engine_computes(memory: CudaMemory):
    [buffer] = memory.allocate(1, 1 << 20)
    await memory.page_hashes(buffer)  # compiled, and host memory at hand
    torch.cuda._sleep(LONG_CYCLES)
    computing = recorded(DEVICE)
    await memory.page_hashes(buffer)
    assert not computing.query()
    await memory.wait_event(computing)
    assert computing.query()


async def test_page_hashes_of_several_buffers_at_once_do_not_mix(memory: CudaMemory):
    payloads = [random_bytes(2 * PAGE_BYTES + i) for i in range(5)]
    buffers = memory.allocate(5, 3 * PAGE_BYTES)
    for _ in range(2):
        with memory.stream():
            for buffer, payload in zip(buffers, payloads, strict=True):
                buffer.cut(len(payload))
                buffer.payload.copy_(payload.to(DEVICE))
        found = [memory.page_hashes(buffer) for buffer in buffers]
        await asyncio.wait(found)
        assert [each.result() for each in found] == [page_hashes(payload.numpy()) for payload in payloads]
        payloads.reverse()


async def test_the_event_loop_goes_on_while_a_stream_is_waited_for(memory: CudaMemory):
    with memory.stream():
        torch.cuda._sleep(LONG_CYCLES)
    waiting, longest_s, last_s = asyncio.ensure_future(memory.finished()), 0.0, time.monotonic()
    while not waiting.done():
        await asyncio.sleep(0)
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert longest_s < 0.05
    await waiting


async def test_waiting_for_a_long_time_costs_no_processor(memory: CudaMemory):
    torch.cuda._sleep(LONG_CYCLES)
    mark = recorded(DEVICE)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    await memory.wait_event(mark)
    waited_s = time.monotonic() - began_s
    assert waited_s > 0.05
    assert time.process_time() - began_cpu_s < waited_s / 4
