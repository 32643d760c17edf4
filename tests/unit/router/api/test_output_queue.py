import asyncio

from router.api.output_queue import OutputQueue


async def test_drivers_wait_while_too_much_is_unread_and_go_on_once_it_is_taken():
    queue: OutputQueue[str] = OutputQueue(max_bytes=100)
    queue.put(0, "a", 60)
    await queue.room()
    queue.put(1, "b", 60)  # another choice of the same client: they share the bound
    waiting = asyncio.create_task(queue.room())
    await asyncio.sleep(0)
    assert not waiting.done() and not queue.has_room
    assert await anext(queue.batches()) == [(0, "a"), (1, "b")]
    await waiting
    assert queue.has_room and queue.num_bytes == 0


async def test_one_output_larger_than_the_bound_passes():
    queue: OutputQueue[str] = OutputQueue(max_bytes=1)
    queue.put(0, "a", 1000)
    assert await anext(queue.batches()) == [(0, "a")]
    assert queue.has_room


async def test_outputs_may_pass_by_while_the_reader_waits_and_has_passed_on_all_before():
    queue: OutputQueue[str] = OutputQueue(max_bytes=100)
    assert not queue.is_awaited
    batches = aiter(queue.batches())
    reading = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert queue.is_awaited
    queue.put(0, "a", 1)
    assert not queue.is_awaited, "the reader is woken, and has not taken it"
    assert await reading == [(0, "a")]
    assert not queue.is_awaited, "the reader has it, and passes it on"
    reading = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert queue.is_awaited
    reading.cancel()
    await asyncio.wait({reading})
    assert not queue.is_awaited, "the reader has left"
